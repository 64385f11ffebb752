"""Whose heartbeats a worker sends and what ends it, with processes that live; tests/stack has real servers."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace
from uuid import UUID

import httpx
import pytest
from prefect.states import Completed, Pending, Running, Scheduled

from tasks.cluster import watchdog, worker

RUN = UUID(int=7)


class Client:
    """Takes the place of the worker's: a run that is in these states, one after the other."""

    def __init__(self, states):
        self.states = list(states)

    async def read_flow_run(self, number):
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return SimpleNamespace(id=number, name="night", tags=[watchdog.TAG], state=state)


def server(states, **others):
    """A worker of Prefect, as far as it is used."""
    return SimpleNamespace(client=Client(states), work_pool=None, is_setup=True, **others)


@pytest.fixture
def loading():
    """A process of a flow run that has not begun."""
    code = "print('there', flush=True); import time; time.sleep(60)"
    environment = {"PREFECT__FLOW_RUN_ID": str(RUN)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"there\n"
    yield process
    process.kill()
    process.wait()


def heartbeats(states, monkeypatch, at_first=0, meanwhile=lambda: None):
    """The runs of which a worker sends heartbeats, every 0.1 s: before `meanwhile`, which `at_first` of them precede,
    and in all."""
    sent = []
    monkeypatch.setattr(watchdog, "send_heartbeat", lambda run, pool: sent.append(run.id))
    monkeypatch.setattr(worker, "POLL_S", 0.02)
    monkeypatch.setattr(worker, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(worker, "ASK_S", 0.05)

    async def work():
        vouching = asyncio.create_task(worker._vouch(server(states), {}))
        async with asyncio.timeout(60):
            while len(sent) < at_first:
                await asyncio.sleep(0.02)
        meanwhile()
        before = list(sent)
        await asyncio.sleep(0.6)
        vouching.cancel()
        with suppress(asyncio.CancelledError):
            await vouching
        return before

    return asyncio.run(work()), sent


def test_a_run_that_takes_long_to_begin_has_heartbeats_while_its_process_lives(loading, monkeypatch):
    def die():
        loading.kill()
        loading.wait()

    before, sent = heartbeats([Pending()], monkeypatch, at_first=3, meanwhile=die)
    assert sent == before == [RUN] * 3


def test_a_run_that_began_sends_its_own(loading, monkeypatch):
    before, sent = heartbeats([Pending(), Running()], monkeypatch, at_first=2)
    assert sent == before == [RUN] * 2


@pytest.mark.parametrize("state", [Completed(), Scheduled()])
def test_a_run_that_has_ended_or_was_given_to_another_worker_has_none(loading, monkeypatch, state):
    """A heartbeat after its end would have it taken for crashed five minutes later."""
    _, sent = heartbeats([state], monkeypatch)
    assert sent == []


def test_a_process_that_never_begins_has_them_for_a_limited_time(loading, monkeypatch):
    monkeypatch.setattr(watchdog, "PENDING_S", 0.0)
    _, sent = heartbeats([Pending()], monkeypatch)
    assert sent == []


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("refused"), KeyError("state"), RuntimeError("Failed to reach API")]
)
def test_an_error_of_any_kind_is_said_once_and_the_heartbeats_go_on(loading, monkeypatch, capsys, error):
    _, sent = heartbeats([error] * 3 + [Pending()], monkeypatch, at_first=3)
    assert sent[:3] == [RUN] * 3
    said = capsys.readouterr().out.splitlines()
    name = f"the heartbeat of flow run {RUN}"
    reason = f"{type(error).__name__}: {error}"
    assert said == [f"{name} has failed, the worker goes on: {reason}", f"{name} succeeds again"]


def test_a_worker_that_ends_by_itself_lets_its_runs_save_and_names_them(loading, monkeypatch):
    """As in Prefect's teardown, the process of a second run is gone when its worker has ended."""
    other = UUID(int=8)
    gone = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], "PREFECT__FLOW_RUN_ID": str(other)})
    monkeypatch.setattr(worker, "POLL_S", 0.02)
    monkeypatch.setattr(watchdog, "send_heartbeat", lambda run, pool: None)

    async def start(printer, with_healthcheck):
        await asyncio.sleep(0.5)
        ending.is_setup = False
        gone.kill()
        gone.wait()
        await asyncio.sleep(0.1)
        raise ExceptionGroup("several", [OSError("port 8080 is taken")])

    async def nothing(*given):
        pass

    parts = dict.fromkeys(("get_and_submit_flow_runs", "_sync_and_initialize", "_submit_run", "_cancel_run"), nothing)
    ending = server([Running()], start=start, **parts)
    assert asyncio.run(worker._work(ending, 10.0, False)) == ({RUN, other}, "OSError: port 8080 is taken")
    assert loading.wait(1) == -signal.SIGTERM


def test_a_worker_that_is_stopped_takes_no_run_while_its_own_save(monkeypatch):
    """It would end the run at once, and nothing resumes one without the tag."""
    saves = "import signal, time; signal.signal(15, lambda *_: (time.sleep(0.5), exit())); print(flush=True)"
    environment = {"PREFECT__FLOW_RUN_ID": str(RUN)}
    run = subprocess.Popen([sys.executable, "-c", f"{saves}; time.sleep(60)"], env=environment, stdout=subprocess.PIPE)
    run.stdout.readline()
    monkeypatch.setattr(worker, "POLL_S", 0.02)
    monkeypatch.setattr(watchdog, "send_heartbeat", lambda run, pool: None)
    taken = []
    lived = []

    async def take(*given):
        taken.append(RUN)

    async def start(printer, with_healthcheck):
        await stopping.get_and_submit_flow_runs()
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            await asyncio.sleep(0.02)
            lived.append(run.poll() is None)
            await stopping.get_and_submit_flow_runs()

    parts = dict.fromkeys(("get_and_submit_flow_runs", "_sync_and_initialize", "_submit_run", "_cancel_run"), take)
    stopping = server([Running()], start=start, **parts)
    assert asyncio.run(worker._work(stopping, 30.0, False)) == ({RUN}, "")
    assert sum(lived) > 3
    assert taken == [RUN]


def test_a_run_that_can_not_be_started_now_is_taken_again(capsys):
    """Its slot is free, and it no longer counts as being started."""

    async def refused(run):
        raise httpx.ConnectError("refused")

    async def asks():
        return [RUN]

    freed = []
    parts = {"_sync_and_initialize": asks, "_cancel_run": refused, "get_and_submit_flow_runs": asks}
    real = SimpleNamespace(
        _submit_run=refused, _submitting_flow_run_ids={RUN}, _release_limit_slot=freed.append, **parts
    )
    worker.keep_going(real, asyncio.Event())
    run = SimpleNamespace(id=RUN)
    assert asyncio.run(real._submit_run(run)) is None
    assert (real._submitting_flow_run_ids, freed) == (set(), [RUN])
    assert asyncio.run(real._cancel_run(RUN)) is None
    assert asyncio.run(real.get_and_submit_flow_runs()) == [RUN]
    said = capsys.readouterr().out
    assert "starting a run has failed, the worker goes on: ConnectError: refused" in said
    assert "cancelling a run that has not begun has failed" in said
