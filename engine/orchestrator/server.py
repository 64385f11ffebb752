"""The orchestrator's only server: POST /ask for stages and programs, /join and /leave for instances, /status,
/metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from engine.config import Config
from engine.errors import BadInput, MetronomeError, ServiceConflict, ServiceFull, StaleRolloutError
from engine.orchestrator.plane import Plane
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.pool.pool_metrics import CONTENT_TYPE as METRICS
from engine.orchestrator.pool.pool_metrics import metrics_text
from engine.run.disk import named_disk_errors
from engine.run.files import write_atomically
from engine.run.limits import check_open_files
from engine.run.logs import log_traceback
from engine.wire.access_token import (
    TOKEN_FILE,
    access_token,
    check_address,
    is_authorized,
    own_token,
    refuse_source,
    write_token,
)
from engine.wire.access_token import VARIABLE as TOKEN
from engine.wire.address import ADDRESS_FILE, bracket_host, reachable_host, split_address
from engine.wire.certificate import CERTIFICATE, Certificate
from engine.wire.connections import HeaderLimit
from engine.wire.messages import (
    CONTENT_TYPE,
    MOST_BYTES,
    PROTOCOL,
    PROTOCOL_HEADER,
    AnyRequest,
    Failure,
    Message,
    pack,
    read_request,
)
from engine.wire.rollout_messages import ROLLOUT_PROTOCOL

MAX_BODY = 64 * 1024
"""Maximum size in bytes of a request to /join or /leave."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
STATUS: dict[type[MetronomeError], int] = {
    BadInput: 400,
    ServiceConflict: 409,
    StaleRolloutError: 409,
    ServiceFull: 429,
}
"""HTTP status of the answer to /ask for each error; all other errors get 503."""
UNAUTHORIZED = (
    "the access token is missing or wrong: give the run folder, whose file rollout.token only its owner can read, or "
    "set METRONOME_TOKEN as it is for the orchestrator"
)
BODY_S = 30.0
"""Seconds that a client has to send a request's body."""
KEEP_ALIVE_S = 86400.0
"""Seconds that an idle connection of an authorized client stays open."""
FREE_S = 5.0
"""Seconds that a port may still be in use: the orchestrator of a killed attempt ends within a second or two."""
LOOK_S = 0.2

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The routes of one run. A refused request has no effect. Requests to /ask wait until there is a plane.

    Instances, programs and people authenticate with METRONOME_TOKEN's token. If it is not set, they use a token in a
    file next to the address that only the user can read. The run's own ranks have a token of their own: some requests
    are for them alone.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._token = access_token()
        self.key = own_token()
        """The token of everybody but our ranks."""
        self._ranks_key = secrets.token_hex(32)
        self.pool: Pool | None = None
        """Set once there are instances, or can be."""
        self._plane: asyncio.Future[Plane] = asyncio.get_running_loop().create_future()
        self.bug: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Receives an exception that is not a MetronomeError, raised while answering."""
        self._left: set[str] = set()
        self._limit = HeaderLimit()
        self.url = ""
        """The URL that our ranks use, once the server listens."""
        self.environment = {TOKEN: self._ranks_key}
        """Environment variables that our ranks need to use the server."""

    @property
    def plane(self) -> Plane | None:
        """The plane that answers /ask; None before there is one."""
        return self._plane.result() if self._plane.done() else None

    def serve_pool(self, pool: Pool) -> None:
        """Begin to let instances join."""
        self.pool = pool

    def serve(self, plane: Plane) -> None:
        """Begin to answer /ask."""
        self._plane.set_result(plane)

    @contextlib.asynccontextmanager
    async def listening(self, folder: Path, certificate: Certificate | None = None) -> AsyncIterator[str]:
        """Listen on rollout.listen while the block runs. Yields host:port, which is also written to
        <folder>/rollout.address.

        `certificate`: with several nodes, the certificate of a second listener, which speaks TLS on the port after that
        of the rendezvous. Raises BadInput if the server can't listen on an address.
        """
        host, _ = listen_address(self._config.rollout.listen)
        runner = await self._limit.run(self._application(), keepalive_timeout=KEEP_ALIVE_S, auto_decompress=False)
        servers = [await self._listen(runner, self._config.rollout.listen, "rollout.listen", None)]
        port = servers[0].sockets[0].getsockname()[1]
        address = f"{bracket_host(reachable_host(host))}:{port}"
        self.url = f"http://{bracket_host('127.0.0.1' if host in ('0.0.0.0', '::') else host)}:{port}"
        file = folder / ADDRESS_FILE
        try:
            if certificate is not None:
                self.environment |= {CERTIFICATE: certificate.public}
                near = rendezvous_neighbour(self._config)
                servers.append(await self._listen(runner, near, "parallel.rendezvous", certificate.server_context()))
                self.url = f"https://{near}"
            (folder / TOKEN_FILE).unlink(missing_ok=True)  # a killed attempt may have left one
            if self._token is None:
                write_token(folder / TOKEN_FILE, self.key)
            write_atomically(file, f"{address}\n")
            yield address
        finally:
            for server in servers:
                server.close()
            if file.exists() and file.read_text() == f"{address}\n":  # another orchestrator may have written its own
                file.unlink()
                (folder / TOKEN_FILE).unlink(missing_ok=True)
            await runner.cleanup()

    async def _listen(
        self, runner: web.AppRunner, address: str, key: str, context: ssl.SSLContext | None
    ) -> asyncio.Server:
        host, port = listen_address(address, key) if context is None else split_address(address, key)
        assert runner.server is not None, "runner.setup() makes it"
        try:
            return await asyncio.get_running_loop().create_server(runner.server, host, port, ssl=context)
        except OSError as error:
            await runner.cleanup()
            raise BadInput(f"{key} = {address!r}: {_reason(error)}") from None

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded], client_max_size=MOST_BYTES)
        app.add_routes(
            [
                web.post("/ask", self._ask),
                web.post("/join", self._join),
                web.post("/leave", self._leave),
                web.get("/status", self._status),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer errors, and close the connection after a request whose client has not proved that it is trusted."""
        self._limit.stop(request.transport)
        asks = request.path == "/ask"
        given = request.headers.get("Authorization")
        # our ranks may know this node by any name (parallel.rendezvous), and no web page knows their token
        refused = None if self._is_ours(request) else refuse_source(request.headers)
        if refused is None and not (self._is_ours(request) or is_authorized(given, self.key)):
            refused = 401, UNAUTHORIZED
        if refused is not None:
            status, reason = refused
            reply: web.StreamResponse = _refused(asks, status, BadInput(reason))
        else:
            try:
                reply = await handler(request)
            except MetronomeError as error:
                reply = _refused(asks, next((STATUS[kind] for kind in STATUS if isinstance(error, kind)), 503), error)
            except web.HTTPException as error:  # no such route or method, body too large
                reply = _refused(asks, error.status, BadInput(error.reason))
        if refused is not None or not asks:
            reply.force_close()  # only the connections of stages and programs stay open
        return reply

    def _is_ours(self, request: web.Request) -> bool:
        """Whether one of the run's own ranks asks."""
        return is_authorized(request.headers.get("Authorization"), self._ranks_key)

    # /ask -----------------------------------------------------------------------------------------

    async def _ask(self, request: web.Request) -> web.Response:
        spoken = request.headers.get(PROTOCOL_HEADER, "none")
        if spoken != str(PROTOCOL):
            raise BadInput(
                f"the client speaks version {spoken:.20} of the plane's protocol, the orchestrator version {PROTOCOL}: "
                "install the same release of Metronome for both"
            )
        if request.content_type != CONTENT_TYPE:
            return _failed(415, BadInput(f"Content-Type {request.content_type!r:.80}, expected {CONTENT_TYPE}"))
        body = await _read(request, MOST_BYTES)
        # a large one is decoded in a thread, so that others are answered meanwhile
        asked = await asyncio.to_thread(_decode, body) if len(body) > MAX_BODY else _decode(body)
        del body  # the request has a copy, and may wait long
        ours = self._is_ours(request)
        plane = await asyncio.shield(self._plane)
        answering = asyncio.ensure_future(plane.answer(asked, ours))
        answering.add_done_callback(partial(self._note_bug, ours=ours))
        with named_disk_errors(self._config.folder):
            try:
                return web.Response(body=pack(await answering), content_type=CONTENT_TYPE)
            except (MetronomeError, OSError):
                raise
            except Exception as error:
                if ours:
                    raise
                log_traceback(error)  # a bug in this server that a program has met: the run goes on
                what = f"{type(asked).__name__}: unexpected {type(error).__name__}: {error}"
                raise MetronomeError(f"{what}; the traceback is in the orchestrator's log") from None

    def _note_bug(self, answering: asyncio.Future[Message], ours: bool) -> None:
        """Let an unexpected exception end the run if our ranks have met it, or if it is the system's: a full disk."""
        error = None if answering.cancelled() else answering.exception()
        if error is None or isinstance(error, MetronomeError):
            return
        if (ours or isinstance(error, OSError)) and not self.bug.done():
            self.bug.set_exception(error)

    # instances ------------------------------------------------------------------------------------

    async def _join(self, request: web.Request) -> web.Response:
        """Answer {"protocol", "name", "url", "weights"}: add the instance to the pool unless it is already there. With
        "again": true, answer 410 if it was asked to leave."""
        body = await _object(request)
        _check_protocol(body)
        name = _name(body)
        url = _url(body, self._token)
        token = body.get("token", "")
        if not (isinstance(token, str) and token.isascii() and token.isprintable()):
            raise BadInput("token: expected the instance's access token, as text")
        again = body.get("again", False)
        if not isinstance(again, bool):
            raise BadInput(f"again = {again!r}: expected true or false")
        if (pool := self.pool) is None:
            return _error(425, "the run does not accept instances yet")
        if pool.failure is not None:
            return _error(503, f"the run is ending: {pool.failure}")
        if pool.weights and body.get("weights") != pool.weights:
            raise BadInput(f"{name} does not hold the weights that are evaluated: start it with a copy of their folder")
        if again and name in self._left:
            return _error(410, f"{name} was asked to leave")
        known = pool.find_instance(name)
        if known is not None and known.leaving:
            return _error(410, f"{name} was asked to leave")
        if known is not None and known.client.url != url:
            if known.declared is not None or known.lives:
                return _error(409, f"the name {name} is taken by an instance at {known.client.url}")
            pool.remove_instance(known, f"joined again at {url}")
            known = None
        if known is None:
            check_open_files(pool.config, len(pool.instances) + 1)
        self._left.discard(name)
        if known is None:
            known = pool.enter(name, url, token=token or self.key)
        known.client.send_token(token or self.key)
        return web.json_response({"state": known.state})

    async def _leave(self, request: web.Request) -> web.Response:
        """Answer {"name"}: give the instance no new groups. It finishes what it holds, and is then gone (not in
        /status)."""
        name = _name(await _object(request))
        known = self.pool.find_instance(name) if self.pool is not None else None
        if known is None or self.pool is None:
            return _error(404, f"there is no instance {name}")
        self._left.add(name)
        self.pool.leave(known)
        return web.json_response({"state": known.state})

    # people ---------------------------------------------------------------------------------------

    async def _status(self, request: web.Request) -> web.Response:
        """Answer with the instances, the last finished step, and the steps in progress."""
        pool = self.pool
        plane = self.plane
        failure = (plane.failure if plane is not None else None) or (pool.failure if pool is not None else None)
        return web.json_response(
            {
                "pool_size": pool.size if pool is not None else 0,
                "instances": [instance.status() for instance in pool.instances] if pool is not None else [],
                "step": self._last().get("step"),
                "failure": str(failure) if failure is not None else None,
                **(plane.status() if plane is not None else {}),
            }
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        """Answer with the metrics in the Prometheus text format."""
        instances = [instance.status() for instance in self.pool.instances] if self.pool is not None else []
        return web.Response(body=metrics_text(instances, self._last()), headers={"Content-Type": METRICS})

    def _last(self) -> Mapping[str, Any]:
        return self.plane.last if self.plane is not None else {}


def rendezvous_neighbour(config: Config) -> str:
    """Return the address at which ranks of all nodes reach the orchestrator: the port after that of the rendezvous."""
    host, port = split_address(config.parallel.rendezvous, "parallel.rendezvous")
    return f"{bracket_host(host)}:{port + 1}"


def listen_address(text: str, key: str = "rollout.listen") -> tuple[str, int]:
    """Return (host, port) of an address. Raises BadInput, naming the `key`, unless it is host:port and, if there is no
    token, on loopback."""
    host, port = split_address(text, key)
    check_address(host, access_token(), key)
    return host, port


def check_addresses(config: Config, free: bool = True) -> None:
    """Raise BadInput, with the server's message, unless this process can listen on `rollout.listen` and, with several
    trainer nodes, on `parallel.rendezvous` and the port after it. Without `free` another run may have the ports."""
    given = [("rollout.listen", config.rollout.listen, *listen_address(config.rollout.listen))]
    if config.parallel.nodes > 1:
        key, text = "parallel.rendezvous", config.parallel.rendezvous
        host, port = split_address(text, key)
        given += [(key, text, host, port), (key, text, *split_address(rendezvous_neighbour(config), key))]
    for key, text, host, port in given:
        deadline = time.monotonic() + (FREE_S if port and free else 0.0)
        while (wrong := _refusal(host, port if free else 0)) is not None:
            if time.monotonic() > deadline:
                raise BadInput(f"{key} = {text!r}: {wrong}")
            time.sleep(LOOK_S)


def _refusal(host: str, port: int) -> str | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        return _reason(error)
    return None


def _reason(error: OSError) -> str:
    """Return the OS error text, without the address that Python prepends."""
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}; expected an address of this machine"
    return os.strerror(error.errno) if error.errno is not None else str(error)


async def _read(request: web.Request, most: int) -> bytearray:
    """Return a body of at most `most` bytes. `request.read` would keep two copies of it. Raises web.HTTPException."""
    size = request.content_length
    if size is None:
        raise web.HTTPLengthRequired(reason="a request needs a Content-Length")
    if size > most:
        reason = f"the body has {size:,} bytes, expected at most {most:,}: send it in several parts"
        raise web.HTTPRequestEntityTooLarge(most, size, reason=reason)
    body = bytearray(size)
    at = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.content.iter_any():
                body[at : at + len(piece)] = piece
                at += len(piece)
    except TimeoutError:
        raise web.HTTPRequestTimeout(reason=f"the body of {size:,} bytes did not arrive within {BODY_S:g} s") from None
    except OSError as error:
        raise web.HTTPBadRequest(reason="the body did not arrive") from error
    return body


def _decode(body: bytearray) -> AnyRequest:
    try:
        return read_request(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"the body is not a request of the plane: {error}") from None


async def _object(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await _read(request, MAX_BODY))
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
            f"protocol: the instance {spoken} of the rollout protocol, this orchestrator speaks {ROLLOUT_PROTOCOL}; "
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
    """Return a valid http://host:port. It must be on loopback if there is no token, since the orchestrator sends
    prompts there."""
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
    return web.json_response({"error": {"message": message, "type": "RegistryError", "code": status}}, status=status)


def _refused(asks: bool, status: int, error: MetronomeError) -> web.Response:
    """Return the answer to a refused request: a message to a stage or program (`asks`), else JSON."""
    return _failed(status, error) if asks else _error(status, str(error))


def _failed(status: int, error: MetronomeError) -> web.Response:
    return web.Response(body=pack(Failure.of(error)), status=status, content_type=CONTENT_TYPE)
