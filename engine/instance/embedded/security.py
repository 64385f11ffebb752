"""What stands between the network and the routes: the access token and limits on requests.
What is refused has no effect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Middleware

from engine.wire.access_token import VARIABLE, authorized

FAULTS = HttpProcessingError, web.RequestPayloadError, ConnectionError
"""What clients do wrong: broken HTTP, a body that can't be decoded, leaving before the answer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

COMPLETIONS = "/v1/completions"
WEIGHT_ROUTES = frozenset(
    {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
)

WEIGHTS_BYTES = 16 * 2**20
"""Largest body of a weight route: names, shapes and checksums of a bucket's tensors, about 200 bytes each;
never the tensors."""
OTHER_BYTES = 2**16
"""Largest body of a control route, and of a completion beside its token ids."""
TOKEN_BYTES = 16
"""Of one token id in a JSON list, generously spaced."""


class Guard:
    """Token and limits of one instance, as aiohttp middlewares."""

    def __init__(self, token: str | None, tokens: int, open_requests: int, read_s: float) -> None:
        """`tokens`: most token ids in a completion's body. `open_requests`: most completions that wait or run at a
        time.

        `read_s`: seconds a client may take to send a body.
        """
        self._token = token
        self._read_s = read_s
        self._open_requests = open_requests
        self._completion_bytes = OTHER_BYTES + TOKEN_BYTES * tokens
        self._open = 0

    def middlewares(self) -> list[Middleware]:
        """In this order: who may not ask is told so before a byte of the body is kept."""
        return [self.demand_token, self.limit_open, self.limit_body]

    @web.middleware
    async def demand_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """401 without the token, except for GET /health."""
        headers = request.headers.getall("Authorization", [])
        asks_health = request.method == "GET" and request.path == "/health"
        if asks_health or authorized(headers[0] if len(headers) == 1 else None, self._token):
            return await handler(request)
        raise web.HTTPUnauthorized(
            headers={"WWW-Authenticate": "Bearer"},
            text=f"send `Authorization: Bearer TOKEN`, with {VARIABLE} of this server",
        )

    @web.middleware
    async def limit_open(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """429 for completions beyond the limit; the client may send them again later, or elsewhere."""
        if request.path != COMPLETIONS:
            return await handler(request)
        if self._open >= self._open_requests:
            raise web.HTTPTooManyRequests(text=f"{self._open} completions wait or run here already, which is the limit")
        self._open += 1
        try:
            return await handler(request)
        finally:
            self._open -= 1

    @web.middleware
    async def limit_body(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Read the body: 413 beyond the route's limit, 408 when it takes too long, 400 when it is cut or garbled."""
        limit = self._limit(request.path)
        if (request.content_length or 0) > limit:
            _too_large(request.path, limit)
        request = request.clone(client_max_size=limit)
        try:
            async with asyncio.timeout(self._read_s):
                await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"the request's body did not arrive within {self._read_s:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            _too_large(request.path, limit)
        except web.RequestPayloadError as error:
            raise web.HTTPBadRequest(text=f"the request's body can't be read: {error}") from None
        return await handler(request)

    def _limit(self, path: str) -> int:
        if path == COMPLETIONS:
            return self._completion_bytes
        return WEIGHTS_BYTES if path in WEIGHT_ROUTES else OTHER_BYTES


class ClientFaults(logging.Filter):
    """Keeps out of the log what a client sent wrong:
    it got its 400, and a trace each would let anybody fill the disk."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for such a record."""
        return not (record.exc_info and isinstance(record.exc_info[1], FAULTS))


def _too_large(path: str, limit: int) -> NoReturn:
    raise web.HTTPRequestEntityTooLarge(limit, text=f"{path} takes bodies of at most {limit} bytes")
