"""Our routes in vLLM's server (its --middleware): the outermost ASGI layer, which every request reaches.

It answers all requests, so that of vLLM's own routes only those with text can be reached from outside (`--text`).
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable

from engine.instance.asgi import Message, Receive, Send
from engine.instance.http import InstanceApp
from engine.instance.vllm.backend import VllmBackend
from engine.instance.vllm.text_routes import VllmText


class Middleware:
    """One instance's routes around vLLM's application, which only starts and ends the engine."""

    options: argparse.Namespace
    """Options of the command line. They are set on the class before vLLM's server makes its layers, because it gives a
    layer nothing but the next one."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._vllm = app
        self._routes: InstanceApp | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request; pass the start and the end of the server on to vLLM."""
        if scope["type"] == "lifespan":
            await self._vllm(scope, receive, send)
            return
        if self._routes is None:  # made with the first request: when vLLM makes its layers there is no engine yet
            backend = VllmBackend(scope["app"].state.engine_client, self.options.routes)
            text = VllmText(self._vllm, backend, self.options.text) if self.options.text else None
            self._routes = InstanceApp(backend, self.options.open_requests, self.options.read_timeout, text)
        await self._routes(scope, receive, send)
