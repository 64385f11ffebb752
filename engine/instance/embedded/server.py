"""The HTTP server of the embedded engine: uvicorn without logs, which ends at once."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from engine.instance.command_line import KEEP_ALIVE_S
from engine.instance.http import InstanceApp


class Server(uvicorn.Server):
    """Serves an instance's routes. Its caller handles signals."""

    def __init__(self, app: InstanceApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                log_level="critical",  # logs of malformed requests would fill the disk; InstanceApp logs faults
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    def end(self) -> None:
        """Make `serve` return soon. Open requests are cut off."""
        self.should_exit = True
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Abort all connections first, so that clients see a broken connection and not an error reply, which counts as
        a fault."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)
