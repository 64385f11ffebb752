"""Whose heartbeats a worker sends, with processes that live; tests/stack/test_silent_runs.py has a real server."""

import asyncio
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace
from uuid import UUID

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
        return SimpleNamespace(id=number, name="night", tags=[watchdog.TAG], state=state)


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

    async def work():
        vouching = asyncio.create_task(worker._vouch(SimpleNamespace(client=Client(states), work_pool=None)))
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
