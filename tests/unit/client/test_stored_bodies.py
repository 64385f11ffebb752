"""A replica group's leader fetches the bodies of its windows from a store. The store is a dictionary: the real one is
tried in tests/integration/test_transferqueue.py."""

import asyncio
import time
from types import SimpleNamespace

import pytest
import torch

from engine.client import stored_bodies
from engine.client.stored_bodies import StoredBodies
from engine.errors import StoreError
from engine.trainer.rollouts import LiveRollouts
from engine.wire.columns import GENERATED, LOGPROBS, Column, pack_group
from engine.wire.messages import EndOfStep, Heartbeat, Lease, StillWaiting, Window
from engine.wire.store_addresses import StoreAddresses, StoreServer
from engine.wire.store_client import StoreClient, StoreFault
from support.groups import numbered_group

GROUPS = [pack_group(numbered_group(index, 0)) for index in range(3)]
CONFIG = SimpleNamespace(data=SimpleNamespace(pushed=False), train=SimpleNamespace(timeout_s=60), window_tokens=100)


def addresses(port):
    return StoreAddresses(StoreServer("controller", "127.0.0.1", {"request": port}), ())


def stored(row):
    """The row without the bodies that lie in the store."""
    return row.with_columns(Column(one.name, one.digest, b"") for one in row.columns if one.name in GENERATED)


def window(groups=GROUPS, lease=1, port=1):
    return Window(step=0, rows=tuple(map(stored, groups)), lease=lease, store=addresses(port))


def whole(groups=GROUPS, lease=1):
    return Window(step=0, rows=tuple(groups), lease=lease)


class Rows:
    """A store in a dictionary, and the connections with it."""

    def __init__(self):
        self.rows = {(one.step, one.index): {name: one.column(name).body for name in GENERATED} for one in GROUPS}
        self.connected = []
        self.unreachable = []
        self.closed = 0
        self.answers = None
        """An event to wait for before each answer."""

    async def connect_servers(self, addresses, name, limit_s):
        self.connected.append(addresses)
        if addresses in self.unreachable:
            raise StoreFault("waited for TransferQueue to connect")
        return self

    async def get_columns(self, step, index, names):
        if self.answers is not None:
            await self.answers.wait()
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1 + index)
        await asyncio.sleep(0)
        torch.set_num_threads(before)
        if (step, index) not in self.rows:
            raise StoreFault("no such row")
        return {name: self.rows[step, index][name] for name in names}

    def close(self):
        self.closed += 1


class Orchestrator:
    """Gives its replies to leases, and keeps what it was asked."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.asked = []
        self.failure = None

    def ask(self, request):
        self.asked.append(request)
        if self.failure is not None:
            raise self.failure
        return self.replies.pop(0) if isinstance(request, Lease) else None


@pytest.fixture
def rows(monkeypatch):
    found = Rows()
    monkeypatch.setattr(StoreClient, "connect_servers", found.connect_servers)
    monkeypatch.setattr(stored_bodies, "BRIEFLY_S", 0.05)
    return found


@pytest.fixture
def bodies(rows):
    found = StoredBodies("trainer-0", 1.0)
    yield found
    found.close()


def leader(orchestrator, bodies):
    rollouts = LiveRollouts(
        orchestrator, SimpleNamespace(replica_group=0, name="trainer-0"), None, CONFIG, bodies=bodies
    )
    return lambda *done: rollouts._lease(0, done, time.monotonic())


def test_the_leader_fetches_what_the_window_lacks_with_one_client_for_each_start_of_the_store(rows, bodies):
    again = window(GROUPS[:1], lease=3, port=2)
    orchestrator = Orchestrator(window(), window(GROUPS[1:], lease=2), again, EndOfStep())
    lease = leader(orchestrator, bodies)
    threads = torch.get_num_threads()
    assert lease() == whole()
    assert torch.get_num_threads() == threads
    assert lease(1) == whole(GROUPS[1:], 2)
    assert (rows.connected, rows.closed) == ([addresses(1)], 0)
    assert lease(2) == whole(GROUPS[:1], 3)
    assert (rows.connected, rows.closed) == ([addresses(1), addresses(2)], 1)
    assert lease(3) == EndOfStep()
    assert [one.done for one in orchestrator.asked] == [(), (1,), (2,), (3,)]
    assert all(one.fetches for one in orchestrator.asked)


def test_a_store_that_can_not_be_reached_is_tried_once(rows, bodies, capsys):
    rows.unreachable = [addresses(1)]
    again = window(GROUPS[:1], lease=3, port=2)
    orchestrator = Orchestrator(*[window(), whole(), window(GROUPS[1:], lease=2), whole(GROUPS[1:], 2), again])
    lease = leader(orchestrator, bodies)
    assert [lease(), lease(1), lease(2)] == [whole(), whole(GROUPS[1:], 2), whole(GROUPS[:1], 3)]
    assert rows.connected == [addresses(1), addresses(2)]
    assert [one.unfetched for one in orchestrator.asked] == [None, 1, None, 2, None]
    assert "could not be reached from this node before" in capsys.readouterr().err


def test_a_window_that_has_its_bodies_is_passed_on(rows, bodies):
    assert leader(Orchestrator(whole()), bodies)() == whole()
    assert not rows.connected


def test_a_unit_that_can_not_reach_the_store_says_so():
    orchestrator = Orchestrator(StillWaiting())
    assert leader(orchestrator, None)() == StillWaiting()
    assert orchestrator.asked == [Lease(replica_group=0, step=0, budget=100, consumer="trainer-0")]


def test_a_slow_store_is_waited_for_with_signs_of_life(rows, bodies):
    rows.answers = asyncio.Event()
    orchestrator = Orchestrator(window())
    lease = leader(orchestrator, bodies)
    assert [lease(), lease()] == [StillWaiting(), StillWaiting()]
    assert orchestrator.asked[1:] == [Heartbeat(replica_group=0), Heartbeat(replica_group=0)]
    rows.answers.set()
    assert lease() == whole()
    assert len(orchestrator.asked) == 3


def test_the_failure_of_the_run_is_heard_while_the_store_is_waited_for(rows, bodies):
    rows.answers = asyncio.Event()
    orchestrator = Orchestrator(window())
    lease = leader(orchestrator, bodies)
    lease()
    orchestrator.failure = StoreError("the controller has not answered")
    with pytest.raises(StoreError, match="the controller"):
        lease()
    rows.answers.set()
    bodies.wait_briefly()


@pytest.mark.parametrize("body", [None, b"other"], ids=["lost", "damaged"])
def test_a_body_that_is_lost_or_damaged_is_left_to_the_orchestrator_which_gives_the_window_later(
    rows, bodies, body, capsys
):
    if body is None:
        del rows.rows[0, 1]
    else:
        rows.rows[0, 1][LOGPROBS] = body
    orchestrator = Orchestrator(window(lease=7), StillWaiting(), whole(lease=7))
    lease = leader(orchestrator, bodies)
    assert lease(6) == StillWaiting()
    assert [one.done for one in orchestrator.asked] == [(6,), ()]  # each lease is acknowledged once
    assert orchestrator.asked[-1] == Lease(
        replica_group=0, step=0, budget=100, consumer="trainer-0", fetches=True, unfetched=7
    )
    assert "replica group 0 leaves lease 7 to the orchestrator" in capsys.readouterr().err
    assert lease() == whole(lease=7)
    assert orchestrator.asked[-1].unfetched is None
