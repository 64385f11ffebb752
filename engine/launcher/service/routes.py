"""The service's HTTP routes: msgpack bodies, one message each (engine.wire.service_messages; docs/service.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from engine.errors import BadInput, MetronomeError, ServiceConflict, ServiceFull, StaleRolloutError
from engine.launcher.service.desk import ServiceDesk
from engine.wire.access_token import authorized
from engine.wire.messages import Failure, Lease, Message, pack
from engine.wire.service_messages import (
    CONTENT_TYPE,
    AwaitVersion,
    InitEngines,
    PutGroup,
    PutPrompts,
    SampleResponses,
    SyncRequest,
)

STATUS: dict[type[MetronomeError], int] = {
    BadInput: 400,
    ServiceConflict: 409,
    StaleRolloutError: 409,
    ServiceFull: 429,
}
"""Status of the answer with each error; others are answered with 503."""
BODY_S = 30.0
"""Seconds that a client has for a request's body."""

Answer = Callable[[Any], Awaitable[Message]]


class ServiceRoutes:
    """The routes over one desk. Whatever is refused has had no effect."""

    def __init__(self, desk: ServiceDesk, token: str | None, max_bytes: int) -> None:
        """`max_bytes`: largest size of what is put and not trained yet, with the bodies under way (service.max_mib)."""
        self._desk = desk
        self._token = token
        self._max_bytes = max_bytes
        self._reading = 0
        """Bytes of the bodies under way."""

    def application(self) -> web.Application:
        """The routes as an aiohttp application."""
        desk = self._desk
        app = web.Application(middlewares=[self._guarded], client_max_size=self._max_bytes)
        routes: list[tuple[str, Any, Answer]] = [
            ("/init_engines", InitEngines, desk.init_engines),
            ("/put_experience_data", PutGroup, desk.put_group),
            ("/get_experience_data", Lease, desk.lease),
            ("/sample", SampleResponses, desk.sample),
            ("/weight_sync_notify", SyncRequest, desk.sync),
            ("/await_version", AwaitVersion, desk.await_version),
        ]
        app.add_routes([web.post(path, self._handler(kind, answer)) for path, kind, answer in routes])
        app.add_routes([web.post("/put_prompts_data", self._put_prompts), web.get("/status", self._status)])
        return app

    def _handler(self, kind: Any, answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:  # noqa: ANN401
        decoder = msgspec.msgpack.Decoder(kind)

        async def handle(request: web.Request) -> web.Response:
            return await self._with_body(request, lambda body: answer(_decoded(decoder, body)))

        return handle

    async def _put_prompts(self, request: web.Request) -> web.Response:
        decoder = msgspec.msgpack.Decoder(PutPrompts)
        return await self._with_body(
            request, lambda body: self._desk.put_prompts(_decoded(decoder, body), size=len(body))
        )

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self._desk.status())

    async def _with_body(self, request: web.Request, answer: Callable[[bytes], Awaitable[Message]]) -> web.Response:
        """Read the body, whose bytes count as held until the answer is there, and answer it."""
        size = request.content_length
        if size is None:
            return _failed(411, BadInput("a request needs a Content-Length"))
        held = self._desk.held_bytes + self._reading
        if held + size > self._max_bytes:
            raise ServiceFull(
                f"the service holds {held:,} bytes that are not trained yet, and {size:,} more would be more than "
                f"{self._max_bytes:,} (service.max_mib)"
            )
        self._reading += size
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
            return web.Response(body=pack(await answer(body)), content_type=CONTENT_TYPE)
        except TimeoutError:
            return _failed(408, BadInput(f"the body of {size:,} bytes did not come within {BODY_S:g} s"))
        finally:
            self._reading -= size

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        reply = await self._answer(request, handler)
        reply.force_close()  # one request per connection: its time is limited (OneRequest)
        return reply

    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not authorized(request.headers.get("Authorization"), self._token):
            return _failed(401, BadInput("the access token (METRONOME_TOKEN) is missing or wrong"))
        try:
            return await handler(request)
        except MetronomeError as error:
            return _failed(next((STATUS[kind] for kind in STATUS if isinstance(error, kind)), 503), error)
        except web.HTTPException as error:  # no such route or method, body too large
            return _failed(error.status, BadInput(error.reason))


def _decoded(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:  # noqa: ANN401
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"the body is no such message: {error}") from None


def _failed(status: int, error: MetronomeError) -> web.Response:
    return web.Response(body=pack(Failure.of(error)), status=status, content_type=CONTENT_TYPE)
