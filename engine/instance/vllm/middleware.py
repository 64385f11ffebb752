"""Our routes in vLLM's server (its --middleware): the outermost ASGI layer, which every request reaches first.

It answers all requests, so from outside only vLLM's text routes can be reached (`--text`), after our checks:
completions and chat completions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable, Callable, Sequence

from engine.instance.http import COMPLETION, InstanceApp, Message, Receive, Send
from engine.instance.vllm.backend import VllmBackend
from engine.types import JsonObject

OF_BODY = (b"content-length", b"transfer-encoding", b"content-type")
"""Headers that describe the body's length and format."""


class VllmText:
    """TextRoutes that pass requests on to vLLM's application."""

    def __init__(
        self,
        app: Callable[[Message, Receive, Send], Awaitable[None]],
        backend: VllmBackend,
        options: argparse.Namespace,
    ) -> None:
        """`app`: vLLM's application. `options`: with the model's name in requests and replies (`text`), and the tokens
        that end a turn (`turn_ends`)."""
        self.name: str = options.text
        self._turn_ends: Sequence[int] = options.turn_ends
        self._app = app
        self._backend = backend

    async def __call__(self, scope: Message, body: JsonObject, receive: Receive, send: Send) -> None:
        """Pass the request on to vLLM. Raise Conflict after a weight update that failed half-way."""
        self._backend.check_whole()
        if scope["path"] == COMPLETION[1]:
            # like training prompts (data.prompt_template) and the embedded engine
            body = {"add_special_tokens": False, **body}
        elif isinstance(given := body.get("stop_token_ids") or [], list):  # vLLM refuses anything else
            body = body | {"stop_token_ids": [*given, *self._turn_ends]}
        content = json.dumps(body).encode()
        headers = [(key, value) for key, value in scope["headers"] if key not in OF_BODY]
        # curl sends another content type, which vLLM refuses
        headers += [(b"content-length", str(len(content)).encode()), (b"content-type", b"application/json")]
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": content, "more_body": False}

        await self._app({**scope, "headers": headers}, replay, send)


class Middleware:
    """One instance's routes around vLLM's application, which only starts and stops the engine."""

    options: argparse.Namespace
    """Options of the command line. They are set on the class before vLLM's server creates its layers, because it passes
    a layer nothing but the next one."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._vllm = app
        self._routes: InstanceApp | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request. Pass the start and the end of the server on to vLLM."""
        if scope["type"] == "lifespan":
            await self._vllm(scope, receive, send)
            return
        if self._routes is None:  # created at the first request: when vLLM creates its layers there is no engine yet
            backend = VllmBackend(scope["app"].state.engine_client, self.options.routes)
            text = VllmText(self._vllm, backend, self.options) if self.options.text else None
            self._routes = InstanceApp(
                backend=backend,
                open_requests=self.options.open_requests,
                read_s=self.options.read_timeout,
                text=text,
                policy_version=self.options.policy_version,
            )
        await self._routes(scope, receive, send)
