"""What the command lines of both engines share; their refusals: tests/contract/test_rollout_routes.py."""

import argparse
import asyncio
import socket

import pytest

from engine.errors import BadInput
from engine.instance import command_line


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_replies_do_not_wait_for_the_clients_acknowledgement(host):
    sock = command_line.bind_socket(argparse.Namespace(host=host, port=0))
    without_delay = []

    def look(reader, writer):
        without_delay.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(look, sock=sock):
        reader, writer = await asyncio.open_connection(host, sock.getsockname()[1])
        await asyncio.wait_for(reader.read(), 5)
        writer.close()
    assert without_delay == [1]


def test_a_port_that_is_taken_is_bad_input():
    with command_line.bind_socket(argparse.Namespace(host="127.0.0.1", port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"--host 127.0.0.1 --port {port}: "):
            command_line.bind_socket(argparse.Namespace(host="127.0.0.1", port=port))
