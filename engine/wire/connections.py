"""What HTTP servers do about strangers: a time limit for the headers of a request, and nothing of theirs in the log."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engine.run.logs import log_error

HEADERS_S = 10.0
"""Seconds that a client has to send a request's headers."""

SERVER_LOG = logging.getLogger("metronome.server")
"""The logger of aiohttp's servers. It drops tracebacks of requests that are not HTTP: anybody can send one."""
SERVER_LOG.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))


def log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle exceptions of an event loop: an error of the operating system becomes one line."""
    if isinstance(context.get("exception"), OSError):
        log_error(f"{context.get('message', 'error')}: {context['exception']}")
    else:
        loop.default_exception_handler(context)


class HeaderLimit:
    """Closes a server's connections whose client does not send the headers of a request in time."""

    def __init__(self, seconds: float = HEADERS_S) -> None:
        self._seconds = seconds
        self._timers: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}

    def expect(self, transport: asyncio.Transport) -> None:
        """Start the time limit of the connection's next request."""
        self.stop(transport)
        self._timers[transport] = asyncio.get_running_loop().call_later(self._seconds, self._close, transport)

    def stop(self, transport: asyncio.BaseTransport | None) -> None:
        """Stop the time limit: the headers have arrived, or the connection is closed."""
        if transport is not None and (timer := self._timers.pop(transport, None)):
            timer.cancel()

    def _close(self, transport: asyncio.Transport) -> None:
        self.stop(transport)
        transport.abort()

    def watch(self, server: web.Server) -> None:
        """Expect the headers of each new connection of aiohttp's server. Its application calls `stop`."""
        made = server.connection_made

        def connection_made(handler: web.RequestHandler, transport: asyncio.Transport) -> None:
            made(handler, transport)
            self.expect(transport)

        server.connection_made = connection_made  # type: ignore[method-assign]
