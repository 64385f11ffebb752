"""Who may read the page of a run, and what a page of a stranger may not."""

import asyncio
import base64

import pytest
from aiohttp import ClientSession, web

from engine.errors import BadInput
from engine.run.files import append_line
from engine.tools.watch.server import WatchServer, serve_page
from engine.wire.access_token import VARIABLE

TOKEN = "a-token"
LINK = {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


async def served(folder, host, asked):
    """The answers to requests: (route, headers) → (status, text, headers)."""
    runner = web.AppRunner(WatchServer(folder, host).application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    answers = []
    try:
        async with ClientSession() as session:
            for route, headers in asked:
                async with session.get(f"http://127.0.0.1:{port}{route}", headers=headers) as reply:
                    answers.append((reply.status, await reply.text(), reply.headers))
    finally:
        await runner.cleanup()
    return answers


async def test_a_page_of_a_stranger_reads_nothing_and_a_link_leads_here(tmp_path):
    append_line(tmp_path / "steps.jsonl", {"step": 0})
    stranger = [{"Origin": "http://evil.example"}, {"Host": "evil.example"}, LINK | {"Sec-Fetch-Dest": "iframe"}]
    stranger.append({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"})
    asked = [("/data", one) for one in [*stranger, LINK]] + [("/", one) for one in stranger]
    for status, text, _ in await served(tmp_path, "127.0.0.1", asked):
        assert (status, "step" in text) == (403, False)
    page, data, wrong, missing = await served(
        tmp_path, "127.0.0.1", [("/", LINK), ("/data", {}), ("/data?after=-1", {}), ("/config.toml", {})]
    )
    assert page[0] == data[0] == 200
    assert '"step":[0]' in data[1]
    assert "expected a number" in wrong[1]
    assert missing[0] == 404
    for _, _, headers in (page, data, wrong, missing):
        assert (headers["X-Frame-Options"], headers["Cache-Control"]) == ("DENY", "no-store")


async def test_off_loopback_it_asks_for_the_token(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, TOKEN)

    def basic(password):
        return {"Authorization": "Basic " + base64.b64encode(f"me:{password}".encode()).decode()}

    right = [basic(TOKEN), {"Authorization": f"Bearer {TOKEN}"}]
    wrong = [{}, basic("other"), basic(""), {"Authorization": "Basic é"}, {"Authorization": "Bearer other"}]
    answers = await served(tmp_path, "0.0.0.0", [("/data", one) for one in [*right, *wrong]])
    assert [status for status, _, _ in answers] == [200] * 2 + [401] * 5
    assert "Basic" in answers[-1][2]["WWW-Authenticate"]


def test_an_address_that_needs_a_token_or_is_taken_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(BadInput, match=VARIABLE):
        serve_page(tmp_path, "0.0.0.0", 0, print)

    async def taken():
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(BadInput, match=f"--port {port}: Address already in use"):
                await asyncio.to_thread(serve_page, tmp_path, "127.0.0.1", port, print)

    asyncio.run(taken())


async def test_a_damaged_file_becomes_a_sentence(tmp_path):
    (tmp_path / "steps.jsonl").write_text("damaged\n")
    ((status, text, _),) = await served(tmp_path, "127.0.0.1", [("/data", {})])
    assert status == 200
    assert "steps.jsonl, line 1: it is damaged" in text


async def test_a_file_that_is_gone_at_this_moment_becomes_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "evaluations.jsonl").write_text("")
    (tmp_path / "responses").mkdir()
    (tmp_path / "responses/step-000003.jsonl").symlink_to("gone")
    monkeypatch.setattr("pathlib.Path.exists", lambda path: True)  # as if it went between this and its opening
    ((status, text, headers),) = await served(tmp_path, "127.0.0.1", [("/samples?of=3", {})])
    assert (status, headers["X-Frame-Options"]) == (200, "DENY")
    assert "step-000003.jsonl: No such file or directory" in text
