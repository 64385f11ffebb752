"""POST /ask of the orchestrator's server: whom it answers, what it refuses before the plane hears of it."""

import asyncio
import contextlib
import re
import stat
from typing import ClassVar

import aiohttp
import msgspec
import pytest

from engine.client.connection import Connection
from engine.config import Config
from engine.errors import BadInput, MetronomeError, ServiceConflict, ServiceFull, StaleRolloutError, Stopped
from engine.orchestrator import server as server_module
from engine.orchestrator.server import Server
from engine.wire.access_token import TOKEN_FILE, authorization_headers
from engine.wire.access_token import VARIABLE as TOKEN
from engine.wire.messages import (
    CONTENT_TYPE,
    PROTOCOL,
    PROTOCOL_HEADER,
    Done,
    Failure,
    Heartbeat,
    pack,
    read_message,
)

BEAT = pack(Heartbeat())


class Plane:
    """Answers with `does`, and keeps what it was asked."""

    last: ClassVar = {}
    failure = None

    def __init__(self, does=lambda request: Done()):
        self.does = does
        self.asked = []

    async def answer(self, request, ours):
        self.asked.append(request)
        await asyncio.sleep(0)
        return self.does(request)


@contextlib.asynccontextmanager
async def asked(folder, plane=None):
    """(server, ask): `ask` sends a body with the right headers, but for those given, and returns status and message.
    All go over one connection as long as the server keeps it."""
    server = Server(Config(run={"output": str(folder.parent), "name": folder.name}))
    if plane is not None:
        server.serve(plane)
    async with server.listening(folder) as address, aiohttp.ClientSession() as session:

        async def ask(body=BEAT, headers=(), method="POST", **more):
            right = {"Content-Type": CONTENT_TYPE, PROTOCOL_HEADER: str(PROTOCOL), **authorization_headers(server.key)}
            sent = {name: value for name, value in (right | dict(headers)).items() if value is not None}
            async with session.request(
                method, f"http://{address}/ask", data=body, headers=sent, skip_auto_headers=["Content-Type"], **more
            ) as answer:
                return answer.status, read_message(await answer.read())

        yield server, ask


async def pieces(*found):
    for one in found:
        yield one


async def test_a_request_with_the_token_in_the_run_folder_is_answered(tmp_path):
    async with asked(tmp_path, plane := Plane()) as (server, ask):
        assert await ask() == (200, Done())
        assert plane.asked == [Heartbeat()]
        token = tmp_path / TOKEN_FILE
        assert (token.read_text(), stat.S_IMODE(token.stat().st_mode)) == (server.key, 0o600)
        connection = Connection(server.url, server.key, "trainer-0", 5.0)
        assert await asyncio.to_thread(connection.ask, Heartbeat()) == Done()
        connection.close()
    assert not token.exists()
    connection = Connection(server.url, server.key, "trainer-0", 5.0)
    with pytest.raises(MetronomeError, match=f"trainer-0: the orchestrator at {server.url} can't be reached"):
        await asyncio.to_thread(connection.ask, Heartbeat())
    connection.close()


async def test_the_runs_ranks_reach_it_by_any_name_of_its_node_and_others_do_not(tmp_path):
    """A name in parallel.rendezvous need not be the one that the machine gives itself."""
    async with asked(tmp_path, Plane()) as (server, ask):
        host = {"Host": "head.cluster:29401"}
        assert await ask(headers=host | authorization_headers(server.environment[TOKEN])) == (200, Done())
        status, failed = await ask(headers=host)
        assert status == 403
        assert "reach this server by its IP address" in failed.message


REFUSED = {
    "no token": ({"headers": {"Authorization": None}}, 401, "the access token is missing or wrong"),
    "another token": ({"headers": authorization_headers("other")}, 401, "the access token is missing or wrong"),
    "another protocol": (
        {"headers": {PROTOCOL_HEADER: str(PROTOCOL + 1)}},
        400,
        f"the client speaks version {PROTOCOL + 1} of the plane's protocol, the orchestrator version {PROTOCOL}",
    ),
    "no protocol": ({"headers": {PROTOCOL_HEADER: None}}, 400, "speaks version none"),
    "another type": ({"headers": {"Content-Type": "application/json"}}, 415, "'application/json', expected"),
    "no length": ({"body": None, "data": "pieces"}, 411, "needs a Content-Length"),
    "too large": ({"body": bytes(2**20 + 1)}, 413, r"1,048,577 bytes, expected at most 1,048,576"),
    "no message": ({"body": b"\xc1"}, 400, "is not a request of the plane"),
    "nothing": ({"body": b""}, 400, "is not a request of the plane"),
    "a reply": ({"body": pack(Done())}, 400, "is not a request of the plane"),
    "too deep": ({"body": b"\x91" * 100_000}, 400, "is not a request of the plane"),
    "another method": ({"method": "GET", "body": None}, 405, "Method Not Allowed"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_never_reaches_the_plane_and_the_server_lives_on(tmp_path, monkeypatch, name):
    monkeypatch.setattr("engine.orchestrator.server.MOST_BYTES", 2**20)
    given, status, said = REFUSED[name]
    if given.pop("data", None):
        given = given | {"body": pieces(BEAT)}
    async with asked(tmp_path, plane := Plane()) as (_, ask):
        found, message = await ask(**given)
        assert (found, message.kind) == (status, "BadInput")
        assert re.search(said, message.message)
        assert not plane.asked
        assert await ask() == (200, Done())


def fails(error):
    def answer(request):
        raise error

    return Plane(answer)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadInput("why"), 400),
        (ServiceConflict("why"), 409),
        (StaleRolloutError("why"), 409),
        (ServiceFull("why"), 429),
        (Stopped("why"), 503),
    ],
)
async def test_an_error_of_ours_is_answered_as_itself_and_is_no_bug(tmp_path, error, status):
    async with asked(tmp_path, fails(error)) as (server, ask):
        assert await ask() == (status, Failure(type(error).__name__, "why"))
        assert not server.bug.done()


async def test_a_mistake_of_ours_is_answered_to_a_program_by_name_and_ends_the_run_if_our_ranks_meet_it(
    tmp_path, capsys
):
    async with asked(tmp_path, fails(KeyError("nothing"))) as (server, ask):
        for _ in range(2):
            status, failure = await ask()
            assert (status, failure.kind) == (503, "MetronomeError")
            assert failure.message.startswith("Heartbeat: unexpected KeyError: 'nothing'; the traceback is in")
        assert not server.bug.done()
        assert "Traceback" in capsys.readouterr().err
        with pytest.raises(msgspec.DecodeError):
            await ask(headers=authorization_headers(server.environment["METRONOME_TOKEN"]))  # 500, and no message
        with pytest.raises(KeyError, match="nothing"):
            await asyncio.wait_for(server.bug, 5)


async def test_a_full_disk_reaches_the_orchestrator_and_who_asked_and_no_traceback_is_written(tmp_path, caplog):
    async with asked(tmp_path, fails(OSError(28, "No space left on device"))) as (server, ask):
        status, failure = await ask()
        assert (status, failure.kind) == (503, "DiskError")
        assert "No space left on device" in failure.message
        with pytest.raises(OSError, match="No space left"):
            await asyncio.wait_for(server.bug, 5)
    assert caplog.records == []


async def test_a_request_waits_until_there_is_a_plane_and_one_that_gives_up_takes_nothing_from_others(tmp_path):
    async with asked(tmp_path) as (server, ask):
        with pytest.raises(TimeoutError):
            await ask(timeout=aiohttp.ClientTimeout(0.2))
        waiting = asyncio.create_task(ask())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        server.serve(Plane())
        assert await asyncio.wait_for(waiting, 5) == (200, Done())


async def test_a_body_has_a_limit_of_time(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "BODY_S", 0.5)
    async with asked(tmp_path, Plane()) as (_, ask):

        async def slow():
            yield b"\x81"
            await asyncio.sleep(60)

        status, failure = await ask(slow(), {"Content-Length": str(2**19)})
        assert (status, "did not arrive within 0.5 s" in failure.message) == (408, True)
        assert await ask() == (200, Done())


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_connection_is_kept_for_a_client_with_the_token_and_closed_after_one_request_of_another(
    tmp_path, trusted
):
    async with asked(tmp_path, Plane()) as (server, _):
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /ask HTTP/1.1\r\nHost: localhost\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(BEAT)}\r\n"
            f"{PROTOCOL_HEADER}: {PROTOCOL}\r\nAuthorization: Bearer {server.key if trusted else 'other'}\r\n\r\n"
        )
        for _ in range(3 if trusted else 1):
            writer.write(head.encode() + BEAT)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert answer.startswith(b"HTTP/1.1 200" if trusted else b"HTTP/1.1 401")
            length = int(re.search(rb"Content-Length: (\d+)", answer)[1])
            await reader.readexactly(length)
        if not trusted:
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_another_orchestrator_keeps_its_address_and_its_token(tmp_path):
    async with asked(tmp_path, Plane()):
        (tmp_path / "rollout.address").write_text("127.0.0.1:1\n")
        (tmp_path / TOKEN_FILE).write_text("theirs")
    assert (tmp_path / "rollout.address").read_text() == "127.0.0.1:1\n"
    assert (tmp_path / TOKEN_FILE).read_text() == "theirs"


async def test_the_token_of_an_attempt_that_was_killed_is_gone_where_there_is_another(tmp_path, monkeypatch):
    (tmp_path / TOKEN_FILE).write_text("old")
    monkeypatch.setenv("METRONOME_TOKEN", "given")
    async with asked(tmp_path, Plane()) as (server, ask):
        assert not (tmp_path / TOKEN_FILE).exists()
        assert await ask() == (200, Done())
