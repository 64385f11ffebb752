"""`metronome serve --join` against a real registry; the instance's process serves next to nothing."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from engine.config import Config
from engine.errors import BadInput, DeadlineError, MetronomeError, ProcessDied
from engine.instance import join
from engine.orchestrator.pool.health import HealthMonitor
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.server import Server
from engine.wire.access_token import TOKEN_FILE, authorization_headers
from support.scripted import SERVES, publishing, until

CONFIG = Config(rollout={"heartbeat_s": 0.3, "wait_s": 1.0, "timeout_s": 10, "instances": 0})


@contextlib.asynccontextmanager
async def orchestrator(folder):
    pool = Pool(CONFIG, folder, folder, synced=True)
    server = Server(CONFIG)
    server.serve_pool(pool)
    await pool.connect_instances()
    try:
        async with HealthMonitor(pool), publishing(pool, 2), server.listening(folder):
            yield pool
    finally:
        await pool.close()


@pytest.fixture
async def guest(tmp_path, monkeypatch):
    """Starts `serve --join` as a task."""
    program = [sys.executable, "-S", "-c", SERVES]
    monkeypatch.setattr(
        join,
        "instance_command",
        lambda config, model, name, number, port_file, port, host: ([*program, str(port_file)], {}),
    )
    said = []
    tasks = []

    def start(address=tmp_path, config=CONFIG):
        serving = join._serve(
            config=config, name="guest", host="127.0.0.1", port=0, address=str(address), say=said.append
        )
        tasks.append(asyncio.create_task(serving))
        return tasks[-1]

    start.said = said
    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
    assert not [p for p in psutil.Process().children() if SERVES in p.cmdline()]


async def test_it_joins_and_a_signal_makes_it_drain_and_leave(tmp_path, guest):
    async with orchestrator(tmp_path) as pool:
        task = guest()
        await until(lambda: pool.serving == 1, "it to serve")
        assert pool.find_instance("guest").version == 2
        async with pool.borrow() as place:
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: place.instance.state == "draining", "its wish to leave")
            await asyncio.sleep(0.5)
            assert not task.done()
        assert await asyncio.wait_for(task, 5) == 0
        assert pool.instances == []
        assert guest.said[-1].startswith("guest leaves the run")


async def test_it_says_soon_that_it_serves(tmp_path, guest):
    """Its heartbeat may take half a minute."""
    slow = CONFIG.model_copy(update={"rollout": CONFIG.rollout.model_copy(update={"heartbeat_s": 60.0})})
    async with orchestrator(tmp_path):
        guest(config=slow)
        await until(lambda: any("is serving in the run at" in one for one in guest.said), "it to say that it serves")


async def test_a_second_signal_ends_it_at_once(tmp_path, guest):
    async with orchestrator(tmp_path) as pool:
        task = guest()
        await until(lambda: pool.serving == 1, "it to serve")
        async with pool.borrow() as place:
            os.kill(os.getpid(), signal.SIGINT)
            await until(lambda: place.instance.state == "draining", "its wish to leave")
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 5)


async def test_it_joins_again_when_the_orchestrator_was_started_again(tmp_path, guest):
    async with orchestrator(tmp_path) as pool:
        guest()
        await until(lambda: pool.serving == 1, "it to serve")
    async with orchestrator(tmp_path) as pool:  # at another port
        await until(lambda: pool.serving == 1, "it to join again")


async def test_it_ends_when_the_orchestrator_sends_it_away(tmp_path, guest):
    async with orchestrator(tmp_path) as pool:
        task = guest(tmp_path / "rollout.address")
        await until(lambda: pool.serving == 1, "it to serve")
        async with aiohttp.ClientSession() as session:
            url = f"http://{(tmp_path / 'rollout.address').read_text().strip()}/leave"
            headers = authorization_headers((tmp_path / TOKEN_FILE).read_text())
            async with session.post(url, json={"name": "guest"}, headers=headers) as answer:
                assert answer.status == 200
        assert await asyncio.wait_for(task, 5) == 0


async def test_it_ends_by_name_when_the_orchestrator_stays_away(tmp_path, guest):
    async with orchestrator(tmp_path) as pool:
        task = guest()
        await until(lambda: pool.serving == 1, "it to serve")
    with pytest.raises(
        DeadlineError, match=rf"the orchestrator at {tmp_path} did not answer for \d+ s \(rollout\.wait_s\)"
    ):
        await asyncio.wait_for(task, 8)


async def test_it_may_be_started_long_before_its_orchestrator(tmp_path, guest):
    """And finds one that takes no instances yet."""
    task = guest()
    await until(lambda: guest.said, "it to say that it waits")
    what = f"the run at {tmp_path} to begin, or to be resumed if it has ended"
    assert guest.said == [f"guest waits for {what}, for up to 10 s (rollout.timeout_s)"]
    await asyncio.sleep(1.5 * CONFIG.rollout.wait_s)
    server = Server(CONFIG)
    async with server.listening(tmp_path):
        await asyncio.sleep(1.5 * CONFIG.rollout.wait_s)
        assert not task.done()
    async with orchestrator(tmp_path) as pool:
        await until(lambda: pool.serving == 1, "it to serve")


async def test_it_ends_by_name_when_no_orchestrator_ever_comes(tmp_path, guest):
    hasty = CONFIG.model_copy(update={"rollout": CONFIG.rollout.model_copy(update={"timeout_s": 2.0})})
    with pytest.raises(DeadlineError, match=rf"at {tmp_path} did not answer for 2 s \(rollout\.timeout_s\): "):
        await asyncio.wait_for(guest(config=hasty), 8)


async def test_it_ends_when_the_orchestrator_refuses_it(tmp_path, guest):
    async with orchestrator(tmp_path) as pool:
        pool.give_up(MetronomeError("a reward raised"))
        with pytest.raises(
            BadInput, match=f"the orchestrator at {tmp_path} refuses guest: 503 the run is ending: a reward raised"
        ):
            await asyncio.wait_for(guest(), 8)


async def test_it_ends_by_name_when_its_instance_dies(tmp_path, guest):
    async with orchestrator(tmp_path) as pool:
        task = guest()
        await until(lambda: pool.serving == 1, "it to serve")
        (process,) = [p for p in psutil.Process().children() if SERVES in p.cmdline()]
        process.kill()
        with pytest.raises(ProcessDied, match="guest was ended by SIGKILL"):
            await asyncio.wait_for(task, 5)


def test_addresses(tmp_path):
    assert join.orchestrator_address("10.0.0.1:80") == "10.0.0.1:80"
    (tmp_path / "rollout.address").write_text("[::1]:4711\n")
    assert join.orchestrator_address(str(tmp_path)) == "[::1]:4711"
    assert join.orchestrator_address(str(tmp_path / "rollout.address")) == "[::1]:4711"


def test_what_to_join_is_checked_before_anything_is_made(tmp_path):
    for good in (str(tmp_path), str(tmp_path / "rollout.address"), "10.0.0.1:80"):
        join.check_join(good)
    with pytest.raises(BadInput, match=f"there is no run folder {Path.cwd()}/runs/nowhere; give one, or host:port"):
        join.check_join("runs/nowhere")
    with pytest.raises(BadInput, match="--join = 'host:port': expected host:port"):
        join.check_join("host:port")
    with pytest.raises(BadInput, match="--join 10.0.0.1:0: port 0 is not valid here"):
        join.check_join("10.0.0.1:0")
