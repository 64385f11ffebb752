"""The launcher's side of the control channel: a pyzmq ROUTER that answers the trainer ranks' requests.

Every request gets exactly one reply. A handler that waits (for a group, for a weight sync) is a coroutine of the
launcher's event loop, so a slow one never blocks another rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import zmq
import zmq.asyncio

from engine.errors import MetronomeError
from engine.wire.codec import pack, unpack
from engine.wire.control_keys import Keys, guard_server

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Takes a request's fields, returns the reply's."""


class ControlServer:
    """Serves handlers by name; a MetronomeError in one becomes an error reply. An address off this node needs keys."""

    def __init__(self, address: str, handlers: Mapping[str, Handler], keys: Keys | None = None) -> None:
        self.address = address
        self._keys = keys
        self._handlers = handlers

    async def serve(self) -> None:
        """Answer requests until cancelled."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            if self._keys is not None:
                guard_server(socket, self._keys)
            socket.bind(self.address)
            async with asyncio.TaskGroup() as answers:  # an unexpected error in a handler ends the server, loudly
                while True:
                    peer, number, data = await socket.recv_multipart()
                    answers.create_task(self._answer(socket, peer, number, unpack(data)))
        finally:
            socket.close(linger=0)
            context.term()

    async def _answer(self, socket: zmq.asyncio.Socket, peer: bytes, number: bytes, request: dict[str, Any]) -> None:
        operation = request.pop("op")
        try:
            reply = await self._handlers[operation](request)
        except MetronomeError as error:
            reply = {"error": type(error).__name__, "message": str(error)}
        await socket.send_multipart([peer, number, pack(reply)])
