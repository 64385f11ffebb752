"""vLLM's own routes with text, behind the checks of our layer: completions, chat completions, list of models."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from engine.instance.asgi import Message, Receive, Send
from engine.instance.http import COMPLETION
from engine.instance.vllm.backend import VllmBackend
from engine.types import JsonObject

OF_BODY = (b"content-length", b"transfer-encoding", b"content-type")
"""Headers that say how long the body is and in what form."""


class VllmText:
    """TextRoutes that vLLM's application answers."""

    def __init__(
        self, app: Callable[[Message, Receive, Send], Awaitable[None]], backend: VllmBackend, name: str
    ) -> None:
        """`app`: vLLM's application. `name`: of the model, in requests and replies."""
        self.name = name
        self._app = app
        self._backend = backend

    async def __call__(self, scope: Message, body: JsonObject, receive: Receive, send: Send) -> None:
        """Give the request to vLLM. Raise Conflict after a weight update that failed half-way."""
        self._backend.check_whole()
        if scope["path"] == COMPLETION[1]:
            # as the prompts of a training (data.prompt_template), and as the embedded engine
            body = {"add_special_tokens": False, **body}
        content = json.dumps(body).encode()
        headers = [(key, value) for key, value in scope["headers"] if key not in OF_BODY]
        # curl names another type, which vLLM refuses
        headers += [(b"content-length", str(len(content)).encode()), (b"content-type", b"application/json")]
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": content, "more_body": False}

        await self._app({**scope, "headers": headers}, replay, send)
