"""The launcher's side of the control channel: a pyzmq ROUTER that answers the trainer ranks' requests.

Every request gets exactly one reply. Each answer is a coroutine of the launcher's event loop, so an answer that waits
(for a group, for a weight sync) does not block another rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import zmq
import zmq.asyncio

from engine.errors import MetronomeError
from engine.wire.control_keys import Keys, guard_server
from engine.wire.messages import PROTOCOL, ControlRequest, Failure, Message, pack, read_request

Answers = Mapping[type[ControlRequest[Any]], Callable[[Any], Awaitable[Message]]]
"""By type of request: the method that answers it."""


class ControlServer:
    """Answers requests; a MetronomeError is answered as a Failure. A TCP address needs `keys`.

    A peer that has another version of the protocol gets only our version as the reply, so that its client can name both
    versions.
    """

    def __init__(
        self, address: str, answer: Callable[[ControlRequest[Any]], Awaitable[Message]], keys: Keys | None = None
    ) -> None:
        self.address = address
        self._keys = keys
        self._answer = answer

    async def serve(self) -> None:
        """Answer requests until cancelled."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            if self._keys is not None:
                guard_server(socket, self._keys)
            socket.bind(self.address)
            async with asyncio.TaskGroup() as replies:  # an unexpected error in an answer ends the server
                while True:
                    replies.create_task(self._reply(socket, await socket.recv_multipart()))
        finally:
            socket.close(linger=0)
            context.term()

    async def _reply(self, socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
        peer, number, *message = frames
        ours = str(PROTOCOL).encode()
        same = len(message) == 2 and message[0] == ours
        await socket.send_multipart(
            [peer, number, ours, pack(await self._answer_or_failure(message[1])) if same else b""]
        )

    async def _answer_or_failure(self, data: bytes) -> Message:
        try:
            return await self._answer(read_request(data))
        except MetronomeError as error:
            return Failure.of(error)
