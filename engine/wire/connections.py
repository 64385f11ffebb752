"""What HTTP servers do about strangers: limits for connections without a request, and nothing of theirs in the log."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engine.run.logs import log_error

HEADERS_S = 10.0
"""Seconds that a client has to send a request's headers."""
MOST_SILENT = 1024
"""Largest number of a server's connections on which no request has arrived yet."""

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
    """Closes a server's connections whose client does not send the headers of a request in time, the oldest of them
    earlier where there are too many. Other connections then always find a free file descriptor."""

    def __init__(self, seconds: float = HEADERS_S, most: int = MOST_SILENT) -> None:
        self._seconds = seconds
        self._most = most
        self._timers: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}

    def expect(self, transport: asyncio.Transport) -> None:
        """Start the time limit of the connection's next request."""
        self.stop(transport)
        if len(self._timers) >= self._most:
            self._close(next(iter(self._timers)))
        self._timers[transport] = asyncio.get_running_loop().call_later(self._seconds, self._close, transport)

    def stop(self, transport: asyncio.BaseTransport | None) -> None:
        """Stop the time limit: the headers have arrived, or the connection is closed."""
        if transport is not None and (timer := self._timers.pop(transport, None)):
            timer.cancel()

    def _close(self, transport: asyncio.BaseTransport) -> None:
        self.stop(transport)
        transport.abort()  # type: ignore[attr-defined]  # of sockets

    async def run(self, app: web.Application, **options: Any) -> web.AppRunner:  # noqa: ANN401
        """Set up aiohttp's server of an application that calls `stop` at each request. `options`: of the runner, which
        the caller cleans up."""
        runner = web.AppRunner(app, access_log=None, logger=SERVER_LOG, shutdown_timeout=0.1, **options)
        await runner.setup()
        server = runner.server
        assert server is not None, "runner.setup() makes it"
        made = server.connection_made

        def connection_made(handler: web.RequestHandler, transport: asyncio.Transport) -> None:
            made(handler, transport)
            self.expect(transport)

        server.connection_made = connection_made  # type: ignore[method-assign]
        asyncio.get_running_loop().set_exception_handler(log_loop_error)
        return runner
