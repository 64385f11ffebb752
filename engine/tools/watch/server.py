"""Serves the page of a run: `metronome watch`. It reads the run folder and answers GET requests; it changes nothing."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from aiohttp import web

from engine.errors import BadInput
from engine.tools.watch.page import make_page
from engine.tools.watch.run_view import RunView
from engine.types import JsonObject
from engine.wire.access_token import access_token, check_address, is_authorized, is_loopback, refuse_source
from engine.wire.address import bracket_host
from engine.wire.connections import HeaderLimit

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WatchServer:
    """The routes of the page. On an address other than loopback, requests need METRONOME_TOKEN: as `Bearer`, or as the
    password for which a browser asks."""

    def __init__(self, folder: Path, host: str) -> None:
        """Raises BadInput for an address that needs a token while there is none."""
        token = access_token()
        check_address(host, token)
        self._token = None if is_loopback(host) else token
        self._view = RunView(folder)
        self.limit = HeaderLimit()
        self._reading = asyncio.Lock()
        """Held while the folder is read, in a thread."""

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._guarded])
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/data", self._data),
                web.get("/timeline", self._timeline),
                web.get("/samples", self._samples),
            ]
        )
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what comes from pages of strangers or has no token. A file that is damaged or can't be read becomes
        the answer. One request per connection."""
        self.limit.stop(request.transport)
        refused = refuse_source(_source(request))
        if refused is None and not self._knows_token(request.headers.get("Authorization")):
            refused = 401, "the access token is missing or wrong: METRONOME_TOKEN is the password, with any name"
        try:
            if refused is not None:
                status, reason = refused
                asks = {"WWW-Authenticate": 'Basic realm="metronome watch"'} if status == 401 else {}
                reply: web.StreamResponse = web.Response(status=status, text=reason, headers=asks)
            else:
                reply = await handler(request)
        except BadInput as error:
            reply = _json({"problem": str(error)})
        except OSError as error:  # a file that the run has just renamed or deleted, or that this user may not read
            reply = _json({"problem": f"{error.filename}: {error.strerror}"})
        except web.HTTPException as error:
            reply = web.Response(status=error.status, text=error.reason)
        reply.headers.update(HEADERS)
        reply.force_close()
        return reply

    def _knows_token(self, given: str | None) -> bool:
        if self._token is None or is_authorized(given, self._token):
            return True
        scheme, _, credentials = (given or "").partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            password = base64.b64decode(credentials, validate=True).partition(b":")[2]
        except ValueError:
            return False
        return is_authorized(b"Bearer " + password, self._token)

    async def _read(self, read: Callable[[], object]) -> web.Response:
        async with self._reading:
            found = await asyncio.to_thread(read)
        return _json(found)

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=make_page(None), content_type="text/html")

    async def _data(self, request: web.Request) -> web.Response:
        """Answer with the state and what is new: steps after the first `after`, if their file is number `of`, and the
        rest unless its checksum is `seen`."""
        after, of, seen = (_number(request, name) for name in ("after", "of", "seen"))

        def read() -> JsonObject:
            found = {"steps": self._view.steps(after, of), "state": self._view.state()}
            rest = self._view.rest()
            checksum = zlib.crc32(json.dumps(rest).encode())
            return found if checksum == seen else found | {"rest": rest, "seen": checksum}

        return await self._read(read)

    async def _timeline(self, request: web.Request) -> web.Response:
        whole = _number(request, "whole") == 1
        return await self._read(lambda: self._view.timeline(whole))

    async def _samples(self, request: web.Request) -> web.Response:
        return await self._read(lambda: self._view.samples(request.query.get("of", "")))


def _source(request: web.Request) -> Mapping[str, str]:
    """The headers that say where a request comes from. A person may follow a link of any page to ours, which holds no
    data: that page can't read it, and no page may frame it."""
    sent = request.headers
    follows = (sent.get("Sec-Fetch-Mode"), sent.get("Sec-Fetch-Dest")) == ("navigate", "document")
    if request.path == "/" and request.method == "GET" and follows and "Origin" not in sent:
        return {name.lower(): value for name, value in sent.items() if name.lower() != "sec-fetch-site"}
    return sent


def _json(found: object) -> web.Response:
    return web.Response(
        body=json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace"),
        content_type="application/json",
    )


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 30):
        raise BadInput(f"{name}={text!r:.40}: expected a number")
    return int(text)


def serve_page(folder: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of a run folder until the process is told to end. `port` 0: any free one. `say` gets the address.
    Raises BadInput if the server can't listen there."""
    asyncio.run(_serve(WatchServer(folder, host), host, port, say))


async def _serve(page: WatchServer, host: str, port: int, say: Callable[[str], None]) -> None:
    runner = await page.limit.run(page.application())
    assert runner.server is not None, "it is set up"
    try:
        try:
            server = await asyncio.get_running_loop().create_server(runner.server, host, port)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno is not None else str(error)
            raise BadInput(f"--port {port}: {reason}; give another one, 0 takes any that is free") from None
        say(f"http://{bracket_host(host)}:{server.sockets[0].getsockname()[1]}/")
        await server.serve_forever()
    finally:
        await runner.cleanup()
