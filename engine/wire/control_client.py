"""A trainer rank's side of the control channel: everything a rank waits for,
it waits for here (never in a collective)."""

from __future__ import annotations

from typing import Any

import zmq

from engine import errors
from engine.errors import DeadlineError, MetronomeError
from engine.wire.codec import pack, unpack
from engine.wire.control_keys import guard_client


class ControlClient:
    """Requests to the launcher, one at a time, each with a deadline."""

    def __init__(self, address: str, replica: str, timeout_s: float) -> None:
        self.replica = replica
        self._timeout_s = timeout_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        guard_client(self._socket)
        self._socket.connect(address)
        self._number = 0

    def ask(self, operation: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        """Send a request and wait for its reply. Raises DeadlineError, or the launcher's error under its own type."""
        self._number += 1
        number = str(self._number).encode()
        self._socket.send_multipart([number, pack({"op": operation, **fields})])
        while True:
            if not self._socket.poll(int(self._timeout_s * 1000)):
                raise DeadlineError(
                    f"{self.replica}: no answer from the launcher to {operation!r} in {self._timeout_s:.0f} s"
                )
            answered, data = self._socket.recv_multipart()
            if answered == number:
                return _raise_error(unpack(data))

    def close(self) -> None:
        """Close the socket; requests under way are dropped."""
        self._socket.close(linger=0)
        self._context.term()


def _raise_error(reply: dict[str, Any]) -> dict[str, Any]:
    if "error" in reply:
        kind = getattr(errors, reply["error"], MetronomeError)
        raise kind(reply["message"])
    return reply
