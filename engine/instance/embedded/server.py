"""The embedded engine's HTTP server: uvicorn without logs and with immediate shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.instance.command_line import KEEP_ALIVE_S
from engine.instance.http import InstanceApp
from engine.wire.connections import HEADERS_S, HeaderLimit


class _Protocol(HttpToolsProtocol):
    """uvicorn's connection, with a time limit for the headers."""

    def __init__(self, limit: HeaderLimit, **given: Any) -> None:  # noqa: ANN401
        super().__init__(**given)
        self._limit = limit

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit.expect(transport)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._limit.expect(self.transport)

    def on_headers_complete(self) -> None:
        self._limit.stop(self.transport)
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.stop(self.transport)
        super().connection_lost(exc)


class EngineServer(uvicorn.Server):
    """Serves an instance's routes. Its caller handles signals."""

    def __init__(self, app: InstanceApp, headers_s: float = HEADERS_S) -> None:
        """`headers_s`: seconds that a client has to send a request's headers."""
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=partial(_Protocol, HeaderLimit(headers_s)),  # type: ignore[arg-type]
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                log_level="critical",  # logs of malformed requests would fill the disk; InstanceApp logs bugs
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    def end(self) -> None:
        """Make `serve` return soon. Open requests are aborted."""
        self.should_exit = True
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """First abort all connections, so that clients see a broken connection instead of an error reply, which would
        count as a fault."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)
