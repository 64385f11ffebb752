"""Limits of an HTTP server's connections: how many there may be, and how long a client may take to send the headers.

A server calls `opened`, `expect_headers`, `stop_limit`, `trust` and `closed`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

from engine.run.logs import log_error

HEADERS_S = 10.0
"""Seconds that a client has to send a request's headers."""
MOST = 4096
"""Most connections at a time, if the limit on open files allows them."""
SPARE = 128
"""Open files reserved for other uses: models, logs, sockets of the process's own requests."""
REPEAT_S = 60.0
"""Seconds until the same message is printed again."""


def most_connections() -> int:
    """Return how many connections a server of this process may have, given its limit on open files."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if files == resource.RLIM_INFINITY else max(16, min(MOST, files - SPARE))


class Connections:
    """The connections of one server, on the event loop that creates this object."""

    def __init__(self, most: int | None = None, headers_s: float = HEADERS_S) -> None:
        self._most = most_connections() if most is None else most
        self._headers_s = headers_s
        self._all: set[asyncio.Transport] = set()
        self._waiting: dict[asyncio.Transport, asyncio.TimerHandle] = {}
        """Connections whose headers are awaited, the longest-waiting first."""
        self._untrusted: dict[asyncio.Transport, str] = {}
        """The peer of each connection whose client has not sent the access token, the oldest first."""
        self._log = RareMessages()

    def opened(self, transport: asyncio.Transport) -> None:
        """Register a new connection. If there are too many, close one: of the peer with the most connections without
        the access token the oldest of these, or, if all have it, the one that has waited longest for headers, or the
        new one."""
        self._all.add(transport)
        self._untrusted[transport] = str((transport.get_extra_info("peername") or [""])[0])
        self.expect_headers(transport)
        if len(self._all) > self._most:
            self._log(f"more than {self._most} connections: closed one")
            self._close(self._dispensable(transport))

    def _dispensable(self, new: asyncio.Transport) -> asyncio.Transport:
        strangers = {one: peer for one, peer in self._untrusted.items() if one is not new}
        if not strangers:
            return next(iter(self._waiting), new)
        ((greedy, _),) = Counter(strangers.values()).most_common(1)
        return next(one for one, peer in strangers.items() if peer == greedy)

    def trust(self, transport: asyncio.Transport) -> None:
        """Note that the client has sent the access token: others are closed before this connection."""
        self._untrusted.pop(transport, None)

    def expect_headers(self, transport: asyncio.Transport) -> None:
        """Start the time limit for the headers of the connection's next request."""
        self.stop_limit(transport)
        if not transport.is_closing():
            timer = asyncio.get_running_loop().call_later(self._headers_s, self._late, transport)
            self._waiting[transport] = timer

    def stop_limit(self, transport: asyncio.Transport) -> None:
        """Stop the time limit: the headers have arrived, or none are awaited."""
        if timer := self._waiting.pop(transport, None):
            timer.cancel()

    def closed(self, transport: asyncio.Transport) -> None:
        """Forget a closed connection."""
        self.stop_limit(transport)
        self._all.discard(transport)
        self._untrusted.pop(transport, None)

    def _late(self, transport: asyncio.Transport) -> None:
        self._log(f"a client did not send all of its headers within {self._headers_s:g} s: closed its connection")
        self._close(transport)

    def _close(self, transport: asyncio.Transport) -> None:
        self.closed(transport)
        transport.abort()


class RareMessages:
    """Prints each message to stderr at most once in REPEAT_S, with the number of times it was suppressed."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def __call__(self, message: str) -> None:
        """Print the message, or count it."""
        now = time.monotonic()
        if now < self._due.get(message, 0.0):
            self._held[message] = self._held.get(message, 0) + 1
            return
        held = self._held.pop(message, 0)
        self._due[message] = now + REPEAT_S
        log_error(message + (f" (and {held} times before)" if held else ""))

    def of_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle exceptions of an event loop: print errors of the operating system rarely, all others as usual.

        Without this, a process without free file descriptors would fill its log with failed attempts to accept a
        connection.
        """
        if isinstance(context.get("exception"), OSError):
            self(f"{context.get('message', 'error')}: {context['exception']}")
        else:
            loop.default_exception_handler(context)


class _BadRequests(logging.Filter):
    """Turns tracebacks of requests that are not HTTP into one line, printed rarely: anyone can send such a request."""

    def __init__(self) -> None:
        super().__init__()
        self._print = RareMessages()

    def filter(self, record: logging.LogRecord) -> bool:
        """Let all other records pass."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self._print(f"refused a request that is not valid HTTP ({type(error).__name__})")  # no text of a stranger
        return not isinstance(error, HttpProcessingError)


SERVER_LOG = logging.getLogger("metronome.server")
"""The logger of aiohttp's servers."""
SERVER_LOG.addFilter(_BadRequests())


class OneRequest(asyncio.Protocol):
    """Passes a connection on to another protocol, with a time limit for the headers and one for the whole request. Once
    the client is trusted, there are no limits."""

    def __init__(
        self,
        inner: asyncio.Protocol,
        connections: Connections,
        whole_s: float = 60.0,
        guards: dict[asyncio.BaseTransport, OneRequest] | None = None,
    ) -> None:
        """`guards`: holds this object under its transport while the connection is open."""
        self._guards = guards if guards is not None else {}
        self._trusted = False
        self._inner = inner
        self._connections = connections
        self._whole_s = whole_s
        self._transport: asyncio.Transport | None = None
        self._end: asyncio.TimerHandle | None = None
        self._head = b""
        """The last bytes received while the end of the headers is awaited."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the limits of a new connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._guards[transport] = self
        self._inner.connection_made(transport)
        self._connections.opened(transport)
        self._end = asyncio.get_running_loop().call_later(self._whole_s, transport.abort)

    def lift_limits(self) -> None:
        """Lift the limits: the client is authorized, and the connection stays open for further requests."""
        self._trusted = True
        if self._end is not None:
            self._end.cancel()

    def data_received(self, data: bytes) -> None:
        """Pass on bytes of the request."""
        if self._trusted:
            self._inner.data_received(data)
            return
        self._head = (self._head + data)[-len(data) - 3 :]
        if b"\r\n\r\n" in self._head and self._transport is not None:
            self._connections.stop_limit(self._transport)
        self._head = self._head[-3:]
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass on that the client sends no more."""
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on that the connection is closed, and drop its limits."""
        if self._transport is not None:
            self._guards.pop(self._transport, None)
            self._connections.closed(self._transport)
        if self._end is not None:
            self._end.cancel()
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass on that the client reads too slowly."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the client reads again."""
        self._inner.resume_writing()
