"""The HTTP server of the embedded engine: uvicorn, quiet, and ended at once."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from engine.instance.command_line import KEEP_ALIVE_S
from engine.instance.http import InstanceApp


class Server(uvicorn.Server):
    """Serves an instance's routes; the signals are left to its caller."""

    def __init__(self, app: InstanceApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                log_level="critical",  # what clients send wrong would fill the disk; faults of ours are InstanceApp's
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    def end(self) -> None:
        """`serve` returns soon. Requests still open are cut off."""
        self.should_exit = True
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cut off first: whoever waits is better told by a broken connection than by an error, which is a fault."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)
