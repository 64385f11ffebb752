"""The trainer rank's side of the control channel. A rank waits for the launcher here, never in a collective."""

from __future__ import annotations

from typing import cast

import zmq

from engine.errors import BadInput, DeadlineError
from engine.wire.control_keys import guard_client
from engine.wire.messages import PROTOCOL, Answer, ControlRequest, Failure, pack, read_message


class ControlClient:
    """Sends requests to the launcher, one at a time, each with a deadline."""

    def __init__(self, address: str, name: str, timeout_s: float) -> None:
        """`address`: of the launcher; `name`: of this rank, for messages; `timeout_s`: seconds to wait for a reply."""
        self._name = name
        self._timeout_s = timeout_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        guard_client(self._socket)
        self._socket.connect(address)
        self._number = 0

    def ask(self, request: ControlRequest[Answer]) -> Answer:
        """Send a request and return its reply.

        Raises DeadlineError without a reply in time, BadInput if the launcher has another version of the protocol, and
        the error with which the launcher answers.
        """
        self._number += 1
        number = str(self._number).encode()
        self._socket.send_multipart([number, str(PROTOCOL).encode(), pack(request)])
        while True:
            if not self._socket.poll(int(self._timeout_s * 1000)):
                raise DeadlineError(
                    f"{self._name}: no answer from the launcher to {type(request).__name__} in {self._timeout_s:.0f} s"
                )
            answered, protocol, data = self._socket.recv_multipart()
            if answered == number:
                self._check_protocol(protocol)
                reply = read_message(data)
                if isinstance(reply, Failure):
                    raise reply.error()
                return cast(Answer, reply)

    def _check_protocol(self, protocol: bytes) -> None:
        if protocol != str(PROTOCOL).encode():
            raise BadInput(
                f"{self._name} speaks version {PROTOCOL} of the control protocol, the launcher version "
                f"{protocol.decode(errors='replace')[:20]}: install the same release of Metronome on all nodes"
            )

    def close(self) -> None:
        """Close the socket; requests under way are dropped."""
        self._socket.close(linger=0)
        self._context.term()
