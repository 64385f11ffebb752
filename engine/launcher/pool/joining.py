"""Where instances join and leave a run: POST /join, POST /leave, GET /status, GET /metrics, served by the launcher."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from engine.config import Config
from engine.errors import BadInput
from engine.launcher.http_server import listen, listen_address
from engine.launcher.pool.pool import Pool
from engine.launcher.pool.pool_metrics import CONTENT_TYPE, exposition
from engine.run.files import write_atomically
from engine.run.limits import check_open_files
from engine.wire.access_token import access_token, authorized, check_address
from engine.wire.address import ADDRESS_FILE, bracketed, reachable
from engine.wire.protocol_version import ROLLOUT_PROTOCOL

MAX_BODY = 64 * 1024
"""Bytes of a request."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class JoinRoutes:
    """The routes over one pool. Whatever is refused has had no effect."""

    def __init__(self, pool: Pool, token: str | None) -> None:
        self._pool = pool
        self._token = token
        self._left: set[str] = set()
        self.step: Callable[[], Mapping[str, Any]] = dict
        """Gives the report of the last finished step."""

    def application(self) -> web.Application:
        """The routes as an aiohttp application."""
        app = web.Application(middlewares=[self._guarded], client_max_size=MAX_BODY)
        app.add_routes(
            [
                web.post("/join", self.join),
                web.post("/leave", self.leave),
                web.get("/status", self.status),
                web.get("/metrics", self.metrics),
            ]
        )
        return app

    async def join(self, request: web.Request) -> web.Response:
        """{"protocol", "name", "url"}: the instance enters the pool, or is in it. With "again":
        true, 410 if it was asked to leave."""
        body = _object(await request.read())
        _check_protocol(body)
        name = _name(body)
        url = _url(body, self._token)
        again = body.get("again", False)
        if not isinstance(again, bool):
            raise BadInput(f"again = {again!r}: expected true or false")
        if self._pool.failure is not None:
            return _error(503, f"the run is ending: {self._pool.failure}")
        if again and name in self._left:
            return _error(410, f"{name} was asked to leave")
        known = self._pool.find(name)
        if known is not None and known.leaving:
            return _error(410, f"{name} was asked to leave")
        if known is not None and known.client.url != url:
            if known.declared is not None or known.lives:
                return _error(409, f"the name {name} is taken by an instance at {known.client.url}")
            self._pool.gone(known, f"joined again at {url}")
            known = None
        if known is None:
            check_open_files(self._pool.config, len(self._pool.instances) + 1)
        self._left.discard(name)
        known = known or self._pool.enter(name, url)
        return _json({"state": known.state})

    async def leave(self, request: web.Request) -> web.Response:
        """{"name"}: no new groups; what it holds is finished, then it is gone (no longer in /status)."""
        name = _name(_object(await request.read()))
        if (known := self._pool.find(name)) is None:
            return _error(404, f"no instance {name}")
        self._left.add(name)
        self._pool.leave(known)
        return _json({"state": known.state})

    async def status(self, request: web.Request) -> web.Response:
        """The instances, and the last finished step."""
        return _json(
            {
                "pool_size": self._pool.size,
                "instances": [instance.status() for instance in self._pool.instances],
                "step": self.step().get("step"),
                "failure": str(self._pool.failure) if self._pool.failure is not None else None,
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus' text format."""
        text = exposition([instance.status() for instance in self._pool.instances], self.step())
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        reply = await self._answer(request, handler)
        reply.force_close()  # one request per connection: its time is limited (OneRequest)
        return reply

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not authorized(request.headers.get("Authorization"), self._token):
            return _error(401, "the access token (METRONOME_TOKEN) is missing or wrong")
        try:
            return await handler(request)
        except BadInput as error:
            return _error(400, str(error))
        except web.HTTPException as error:  # no such route or method, body too large
            return _error(error.status, error.reason)


@contextlib.asynccontextmanager
async def serve_joining(pool: Pool, config: Config, folder: Path) -> AsyncIterator[JoinRoutes]:
    """Serve on rollout.listen within the block, the address in <folder>/rollout.address.
    Raises BadInput if that can't be."""
    host, _ = listen_address(config.rollout.listen, "rollout.listen")
    routes = JoinRoutes(pool, access_token())
    file = folder / ADDRESS_FILE
    runner = web.AppRunner(routes.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    server = await listen(runner, config.rollout.listen, "rollout.listen")
    address = f"{bracketed(reachable(host))}:{server.sockets[0].getsockname()[1]}\n"
    try:
        write_atomically(file, address)
        yield routes
    finally:
        server.close()
        if file.exists() and file.read_text() == address:  # another launcher may have written its own
            file.unlink()
        await runner.cleanup()


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadInput("the body is not JSON") from None
    if not isinstance(body, dict):
        raise BadInput("the body must be a JSON object")
    return body


def _check_protocol(body: Mapping[str, Any]) -> None:
    version = body.get("protocol")
    if type(version) is not int or version != ROLLOUT_PROTOCOL:
        spoken = "does not say its version" if version is None else f"speaks version {version!r}"
        raise BadInput(
            f"protocol: the instance {spoken} of the rollout protocol, this launcher speaks {ROLLOUT_PROTOCOL}; "
            "start the instance with the release of Metronome that the run has"
        )


def _name(body: Mapping[str, Any]) -> str:
    name = body.get("name")
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise BadInput(
            f"name = {name!r}: expected up to 100 letters, digits, '.', '_' and '-', the first a letter or digit"
        )
    return name


def _url(body: Mapping[str, Any], token: str | None) -> str:
    """http://host:port. Off loopback only where there is a token: the launcher would send prompts there."""
    url = body.get("url")
    problem = BadInput(f"url = {url!r}: expected http://host:port")
    if not isinstance(url, str):
        raise problem
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.port is None or url != f"http://{parts.netloc}" or "@" in parts.netloc:
            raise problem
    except ValueError:
        raise problem from None
    if token is None:
        check_address(parts.hostname or "", token, "url")
    return url


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message, "type": "RegistryError", "code": status}}, status)


def _json(value: Any, status: int = 200) -> web.Response:  # noqa: ANN401
    return web.json_response(value, status=status)
