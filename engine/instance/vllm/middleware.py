"""Our protocol on top of vLLM's server (its --middleware): the outermost ASGI layer, through which every request
passes.

Token and limits first, then only the routes of the protocol; vLLM's many others do not exist from outside. Completions
are checked, passed on, and their replies get the weight version; weight routes go to our session in vLLM's workers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from engine.errors import BadInput
from engine.instance.vllm.routes import Refusal, VllmInstance
from engine.wire.access_token import VARIABLE, access_token, authorized

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COMPLETIONS = "/v1/completions"
PASSED = {("GET", "/health"), ("GET", "/metrics"), ("GET", "/get_world_size")}
"""Routes that vLLM answers itself."""
WEIGHT_ROUTES = frozenset(
    {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
)

WEIGHTS_BYTES = 16 * 2**20
"""Largest body of a weight route: names, shapes and checksums of a bucket's tensors, never the tensors."""
OTHER_BYTES = 2**16
"""Largest body of a control route, and of a completion beside its token ids."""
TOKEN_BYTES = 16
"""Of one token id in a JSON list, generously spaced."""
READ_S = 30.0
"""Seconds a client may take to send a body."""


class Middleware:
    """One instance's routes."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._token = access_token()
        self._service: VllmInstance | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on to vLLM."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            try:
                await self._answer(scope, receive, send)
            except BadInput as error:
                await _send_error(send, 400, "BadRequest", str(error))
            except Refusal as error:
                await _send_error(
                    send=send, status=error.status, kind=error.kind, message=str(error), headers=error.headers
                )
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = (scope["method"], scope["path"])
        self._demand_token(scope, route)
        service = self._of(scope)
        if route == ("POST", COMPLETIONS):
            body = await self._body(scope, receive, OTHER_BYTES + TOKEN_BYTES * service.limits.max_context)
            await self._complete(scope=scope, receive=receive, send=send, service=service, body=body)
            return
        handler = service.handlers.get(route)
        if handler is None and route not in PASSED:
            known = {method for method, path in {*service.handlers, *PASSED, ("POST", COMPLETIONS)} if path == route[1]}
            if known:
                raise Refusal(
                    405,
                    "MethodNotAllowed",
                    f"{route[1]} takes {', '.join(sorted(known))}",
                    {"Allow": ", ".join(sorted(known))},
                )
            raise Refusal(404, "NotFound", f"there is no route {route[1]}")
        body = await self._body(scope, receive, WEIGHTS_BYTES if route[1] in WEIGHT_ROUTES else OTHER_BYTES)
        if handler is None:
            await self._app(scope, _replay(body, receive), send)
        else:
            await _send_json(send, 200, await handler(_query(scope), body))

    def _of(self, scope: Scope) -> VllmInstance:
        """Made with the first request: when vLLM builds its layers there is no engine yet."""
        if self._service is None:
            self._service = VllmInstance(scope["app"].state.engine_client)
        return self._service

    def _demand_token(self, scope: Scope, route: tuple[str, str]) -> None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if route != ("GET", "/health") and not authorized(given[0] if len(given) == 1 else None, self._token):
            raise Refusal(
                401,
                "Unauthorized",
                f"send `Authorization: Bearer TOKEN`, with {VARIABLE} of this server",
                {"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, scope: Scope, receive: Receive, limit: int) -> bytes:
        """The request's body: 413 beyond the limit, 408 when it takes too long."""
        too_large = Refusal(413, "RequestEntityTooLarge", f"{scope['path']} takes bodies of at most {limit} bytes")
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        parts = []
        size = 0
        try:
            async with asyncio.timeout(READ_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(400, "BadRequest", "the connection ended before the body did")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise Refusal(408, "RequestTimeout", f"the request's body did not arrive within {READ_S:g} s") from None

    async def _complete(self, scope: Scope, receive: Receive, send: Send, service: VllmInstance, body: bytes) -> None:
        """A completion through vLLM, its reply held back until the workers said which version they hold now."""
        asked = json.dumps(service.parse_completion(body)).encode()
        headers = [pair for pair in scope["headers"] if pair[0] not in (b"content-length", b"content-type")]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(asked)).encode())]
        async with service.turn(receive) as before:
            reply = _Reply()
            await self._app({**scope, "headers": headers}, _replay(asked, receive), reply.take)
            content = await service.finish_completion(reply.status, reply.body, before)
        await _send_json(send, reply.status, content)


class _Reply:
    """What vLLM sends, kept."""

    def __init__(self) -> None:
        self.status = 500
        self._parts = list[bytes]()

    async def take(self, message: Message) -> None:
        """An ASGI send."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self._parts.append(message.get("body", b""))

    @property
    def body(self) -> bytes:
        """Of the whole reply."""
        return b"".join(self._parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """An ASGI receive that gives the body once, then whatever the client does (vLLM cancels when it disconnects)."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _query(scope: Scope) -> str:
    return str(scope.get("query_string", b"").decode("ascii", "replace"))


async def _send_error(send: Send, status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> None:
    await _send_json(send, status, {"error": {"message": message, "type": kind + "Error", "code": status}}, headers)


async def _send_json(send: Send, status: int, value: Any, headers: dict[str, str] | None = None) -> None:  # noqa: ANN401
    body = json.dumps(value).encode()
    pairs = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.lower().encode(), value.encode()) for name, value in pairs.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
