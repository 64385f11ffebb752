"""Half-sent requests and bytes that are no HTTP, on the servers that strangers may reach."""

import asyncio
import contextlib
import re
import socket
import struct
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
from engine.verifier import openai_server
from engine.verifier.openai_server import serve_conversation
from engine.wire.connections import HeaderLimit, log_loop_error
from engine.wire.messages import PROTOCOL

HEADERS_S = 0.5
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
    server = EngineServer(InstanceApp(Idle(), open_requests=8, read_s=5.0), HEADERS_S)
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
    served = WatchServer(folder, "127.0.0.1")
    runner = await served.limit.run(served.application())
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
    monkeypatch.setattr(orchestrator_server, "HeaderLimit", lambda: HeaderLimit(HEADERS_S))
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


@pytest.mark.parametrize("sent", [b"", b"G", GET[:-2]])
async def test_headers_that_do_not_come_end_the_connection(port, sent):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert await closed_after(reader) < HEADERS_S + 5
    assert await status(port) == b"200"
    writer.close()


@pytest.mark.parametrize("server", [*SERVERS.values(), page, conversation])
async def test_connections_without_a_request_take_no_place_from_others(tmp_path, monkeypatch, server):
    """Strangers open more of them than may be silent, and send nothing."""
    monkeypatch.setenv("METRONOME_TOKEN", "right")
    monkeypatch.setattr(openai_server, "MOST_SILENT", 8)
    monkeypatch.setattr(HeaderLimit.__init__, "__defaults__", (HEADERS_S * 20, 8))
    async with server(tmp_path) as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        assert (await status(port)).isdigit()
        ended = [reader for reader, _ in opened if await is_closed(reader)]
        assert ended == [reader for reader, _ in opened[: len(ended)]]
        assert len(ended) in (12, 13)  # one more for the request's own connection
        for _, writer in opened:
            writer.close()


async def is_closed(reader):
    try:
        return await asyncio.wait_for(reader.read(1), 0.05) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


async def test_half_a_request_after_a_whole_one_ends_the_connection(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET + GET[:-2])
    assert await closed_after(reader) < HEADERS_S + 5
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


async def test_what_the_system_refuses_is_a_line_of_the_log(capsys):
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_loop_error)
    loop.call_exception_handler({"message": "accept() failed", "exception": OSError(24, "Too many open files")})
    assert capsys.readouterr().err == "accept() failed: [Errno 24] Too many open files\n"
