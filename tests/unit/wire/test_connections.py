"""Half-sent requests and too many connections, on the servers that use the limits."""

import asyncio
import contextlib
import re
import socket
import struct
import subprocess
import sys
import time
import unittest.mock

import pytest
from aiohttp import web
from yarl import URL

from engine.config import Config
from engine.instance.embedded.server import EngineServer
from engine.instance.http import InstanceApp
from engine.instance.protocol import RequestLimits
from engine.orchestrator import server as orchestrator_server
from engine.orchestrator.server import Server as OrchestratorServer
from engine.tools.watch.server import WatchServer
from engine.verifier.openai_server import serve_conversation
from engine.wire import connections
from engine.wire.connections import SERVER_LOG, Connections, OneRequest, RareMessages, most_connections
from engine.wire.messages import PROTOCOL

HEADERS_S = 0.5
MOST = 8
GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer right\r\n\r\n"


class Idle:
    """A backend of which only the routes around it are used."""

    limits = RequestLimits(vocabulary=50, max_context=32, stop_ids=frozenset())

    async def check_health(self):
        pass

    async def load(self):
        return {"running": 0, "waiting": 0, "weight_version": 0, "generated_tokens": 0, "prefills": 0}

    async def metrics(self):
        return b""


@contextlib.asynccontextmanager
async def instance(folder):
    server = EngineServer(InstanceApp(Idle(), open_requests=8, read_s=5.0), Connections(MOST, HEADERS_S))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = asyncio.create_task(server.serve([listening]))
        yield listening.getsockname()[1]
        server.end()
        await task


@contextlib.asynccontextmanager
async def orchestrator(folder):
    async with OrchestratorServer(Config()).listening(folder) as address:
        yield int(address.rpartition(":")[2])


@contextlib.asynccontextmanager
async def page(folder):
    runner = web.AppRunner(WatchServer(folder, "127.0.0.1").application(), access_log=None, logger=SERVER_LOG)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@contextlib.asynccontextmanager
async def conversation(folder):
    with unittest.mock.patch("secrets.token_hex", return_value="right"):
        async with serve_conversation(None) as (url, _):
            yield URL(url).port


SERVERS = {"instance": instance, "orchestrator": orchestrator}


@pytest.fixture(params=SERVERS)
async def port(request, tmp_path, monkeypatch):
    monkeypatch.setenv("METRONOME_TOKEN", "right")
    monkeypatch.setattr(orchestrator_server, "Connections", lambda: Connections(MOST, HEADERS_S))
    async with SERVERS[request.param](tmp_path) as found:
        yield found


async def status(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET)
    line = await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    return line.split()[1]


async def closed_after(reader):
    """Seconds until the server closes the connection."""
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while await asyncio.wait_for(reader.read(1000), 20):
            pass
    return time.monotonic() - began


class Transport(asyncio.Transport):
    """A connection that is only opened and closed."""

    closing = False

    def __init__(self, peer="a"):
        super().__init__({"peername": (peer, 1)})

    def is_closing(self):
        return self.closing

    def abort(self):
        self.closing = True


async def test_as_many_connections_as_there_may_be_are_kept_and_of_one_more_the_one_that_waits_longest_goes():
    found = Connections(most=3, headers_s=60.0)
    first, second, *others = (Transport() for _ in range(5))
    for one in (first, second, others[0]):
        found.opened(one)
    found.stop_limit(first)
    found.trust(first)
    assert not any(one.closing for one in (first, second, others[0]))
    found.opened(others[1])
    assert [one.closing for one in (first, second, *others[:2])] == [False, True, False, False]
    for one in (first, *others[:2]):
        found.stop_limit(one)
        found.trust(one)
    found.opened(others[2])
    assert others[2].closing  # all others are trusted and have sent what is asked of them
    assert not found._waiting


async def test_of_clients_without_the_token_the_peer_with_the_most_loses_its_oldest_whatever_it_has_sent():
    found = Connections(most=4, headers_s=60.0)
    friend, other, *many = (Transport(peer) for peer in ("a", "b", *"ccccc"))
    for one in (friend, other, *many[:2]):
        found.opened(one)
        found.stop_limit(one)
    found.trust(friend)
    for one in many[2:]:
        found.opened(one)
    assert [one.closing for one in (friend, other, *many)] == [False, False, True, True, True, False, False]


class Inner(asyncio.Protocol):
    def __init__(self):
        self.data = b""

    def data_received(self, data):
        self.data += data


async def test_headers_may_come_in_pieces_but_not_the_whole_request_for_ever():
    inner = Inner()
    one = OneRequest(inner, Connections(most=3, headers_s=0.1), whole_s=1.0)
    transport = Transport()
    one.connection_made(transport)
    for piece in (GET[:-3], b"\n", b"\r", b"\n"):
        one.data_received(piece)
    await asyncio.sleep(0.3)
    assert inner.data == GET
    assert not transport.closing
    await asyncio.sleep(1.0)
    assert transport.closing


async def test_a_client_that_is_trusted_may_take_its_time_for_further_requests():
    inner = Inner()
    guards = {}
    found = Connections(most=3, headers_s=0.1)
    one = OneRequest(inner, found, whole_s=0.3, guards=guards)
    transport = Transport()
    one.connection_made(transport)
    one.data_received(GET)
    guards[transport].lift_limits()
    await asyncio.sleep(0.5)
    one.data_received(GET[:-2])
    await asyncio.sleep(0.3)
    assert not transport.closing
    assert inner.data == GET + GET[:-2]
    one.connection_lost(None)
    assert not guards


@pytest.mark.parametrize("sent", [b"", b"G", GET[:-2]])
async def test_headers_that_do_not_come_end_the_connection(port, sent):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert await closed_after(reader) < HEADERS_S + 5
    assert await status(port) == b"200"
    writer.close()


async def test_half_a_request_after_a_whole_one_ends_the_connection(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET + GET[:-2])
    assert await closed_after(reader) < HEADERS_S + 5
    writer.close()


async def test_half_sent_requests_do_not_keep_others_out(port):
    """More than there may be: the oldest give way."""
    held = []
    for _ in range(3 * MOST):
        held.append(await asyncio.open_connection("127.0.0.1", port))
        held[-1][1].write(GET[:-2])
    assert await status(port) == b"200"
    for _, writer in held:
        writer.close()


STRANGER = [
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /join HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{",
    b"POST /pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{",
]
"""Whole requests without the token, and headers whose body never comes."""


@pytest.mark.parametrize("sent", STRANGER)
async def test_idle_clients_without_the_token_do_not_keep_others_out(port, sent):
    held = []
    try:
        for _ in range(3 * MOST):
            held.append(await asyncio.open_connection("127.0.0.1", port))
            held[-1][1].write(sent)
        for _ in range(MOST):
            assert await status(port) == b"200"
        reader, writer = held[-1]
        assert b"connection: close" in (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).lower()
    finally:
        for _, writer in held:
            writer.close()


HALF = b"POST %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer right\r\n%s\r\n%s"
ASKED = b"Content-Type: application/msgpack\r\nMetronome-Protocol: %d\r\n" % PROTOCOL
CHUNKED = b"Transfer-Encoding: chunked\r\n"
ROUTES = [b"/ask", b"/join", b"/leave", b"/v1/completions", b"/v1/chat/completions"]
LEFT = [HALF % (route, b"Content-Length: 99\r\n" + ASKED, b"{") for route in ROUTES]
LEFT += [HALF % (route, CHUNKED + ASKED, b"1\r\n{") for route in ROUTES]
LEFT += [HALF % (route, CHUNKED, b"no number\r\n{") for route in ROUTES]
LEFT += [
    HALF % (route, b"Content-Length: 2\r\nContent-Type: application/json; charset=x\r\n", b"{}") for route in ROUTES
]
LEFT += [
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"no HTTP\r\n\r\n",
    GET,
    GET.replace(b"metrics", b"status"),
    GET.replace(b"metrics", b"data"),
]


@pytest.mark.parametrize("reset", [True, False])
async def test_a_client_that_goes_away_or_speaks_no_http_leaves_no_traceback(tmp_path, monkeypatch, caplog, reset):
    """As one that is killed. Every server, each route that reads a body, and answers that nobody takes."""
    told = []
    monkeypatch.setattr(SERVER_LOG.filters[0], "_print", told.append)
    monkeypatch.setenv("METRONOME_TOKEN", "right")
    for server in [*SERVERS.values(), page, conversation]:
        async with server(tmp_path) as port:
            for sent in LEFT:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                await writer.drain()
                await asyncio.sleep(0.02)
                if reset:
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.close()
            await asyncio.sleep(0.1)
    assert {*told} == {"refused a request that is not valid HTTP (BadHttpMessage)"}
    assert [record.getMessage() + str(record.exc_info) for record in caplog.records if record.exc_info] == []


async def test_a_connection_that_is_kept_alive_may_be_idle_for_longer_than_headers_take(tmp_path, monkeypatch):
    monkeypatch.setenv("METRONOME_TOKEN", "right")
    async with instance(tmp_path) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(GET)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 200")
            assert b"connection: close" not in head
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
            await asyncio.sleep(2 * HEADERS_S)
        writer.close()


def test_the_number_of_connections_leaves_open_files_for_other_things():
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); "
    code += "from engine.wire.connections import most_connections; print(most_connections())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True).stdout
    assert int(said) == 256 - connections.SPARE
    assert 16 <= most_connections() <= connections.MOST


def test_the_same_message_is_printed_once_a_minute_with_its_count(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(connections.time, "monotonic", lambda: now)
    log = RareMessages()
    for _ in range(1000):
        log("no more files")
    log("another")
    now = 61.0
    log("no more files")
    assert capsys.readouterr().err.splitlines() == ["no more files", "another", "no more files (and 999 times before)"]


async def test_what_the_system_refuses_is_logged_rarely(capsys):
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(RareMessages().of_loop)
    for _ in range(1000):
        loop.call_exception_handler({"message": "accept() failed", "exception": OSError(24, "Too many open files")})
    assert capsys.readouterr().err.count("Too many open files") == 1
