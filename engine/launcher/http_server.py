"""A server of the launcher: it listens on an address of the recipe, and its connections have limits."""

from __future__ import annotations

import asyncio
import os
import socket
import time

from aiohttp import web

from engine.errors import BadInput
from engine.wire.access_token import access_token, check_address
from engine.wire.address import split_address
from engine.wire.connections import Connections, OneRequest, RareMessages

FREE_S = 5.0
"""Seconds that a port may still be taken: the launcher of a killed attempt ends within a second or two."""
LOOK_S = 0.2


async def listen(runner: web.AppRunner, address: str, key: str, whole_s: float = 60.0) -> asyncio.Server:
    """Serve an application whose connections have limits, of `whole_s` seconds each. The runner is set up.

    `key` names the address. Raises BadInput if it can't be listened on.
    """
    host, port = listen_address(address, key)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(RareMessages().of_loop)
    connections = Connections()

    def connection() -> OneRequest:
        assert runner.server is not None, "runner.setup() makes it"
        return OneRequest(runner.server(), connections, whole_s)

    try:
        return await loop.create_server(connection, host, port)
    except OSError as error:
        await runner.cleanup()
        raise BadInput(f"{key} = {address!r}: {_reason(error)}") from None


def listen_address(text: str, key: str = "rollout.listen") -> tuple[str, int]:
    """(host, port) of an address. Raises BadInput, which names the `key`, unless it is host:port, on loopback where
    there is no token."""
    host, port = split_address(text, key)
    check_address(host, access_token(), key)
    return host, port


def check_listens(text: str, key: str = "rollout.listen") -> None:
    """Raise BadInput unless a server of this process can listen on an address, with the words of `listen`."""
    host, port = listen_address(text, key)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + (FREE_S if port else 0.0)
    while (wrong := _refusal(family, host, port)) is not None:
        if time.monotonic() > deadline:
            raise BadInput(f"{key} = {text!r}: {wrong}")
        time.sleep(LOOK_S)


def _refusal(family: socket.AddressFamily, host: str, port: int) -> str | None:
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return _reason(error)
    return None


def _reason(error: OSError) -> str:
    """Without the address, which Python adds."""
    return os.strerror(error.errno) if error.errno is not None else str(error)
