"""A unit's leader fetches the bodies of its windows from a store. The store is a dictionary: the real one is tried in
tests/integration/test_transferqueue.py."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
import torch

from engine.errors import StoreError
from engine.trainer import stored_bodies
from engine.trainer.rollouts import LiveRollouts
from engine.trainer.stored_bodies import StoredBodies
from engine.wire.messages import EndOfStep, Heartbeat, Lease, StillWaiting, Window
from engine.wire.sealed import seal_group
from engine.wire.store_addresses import StoreAddresses, StoreServer
from engine.wire.store_client import StoreClient, StoreFault
from support.groups import numbered_group

GROUPS = [seal_group(numbered_group(index, 0)) for index in range(3)]


def addresses(port):
    return StoreAddresses(StoreServer("controller", "127.0.0.1", {"request": port}), ())


def window(groups=GROUPS, lease=1, port=1):
    return Window(tuple(msgspec.structs.replace(one, body=b"") for one in groups), lease=lease, store=addresses(port))


class Rows:
    """Keys and values, and the connections with them."""

    def __init__(self):
        self.rows = {(one.step, one.index): one.body for one in GROUPS}
        self.connected = []
        self.closed = 0
        self.answers = None
        """An event to wait for before each answer."""

    async def connect(self, addresses, name, limit_s):
        self.connected.append(addresses)
        return self

    async def get(self, step, index):
        if self.answers is not None:
            await self.answers.wait()
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1 + index)
        await asyncio.sleep(0)
        torch.set_num_threads(before)
        if (step, index) not in self.rows:
            raise StoreFault("no such row")
        return self.rows[step, index]

    def close(self):
        self.closed += 1


class Launcher:
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
    monkeypatch.setattr(StoreClient, "connect", found.connect)
    monkeypatch.setattr(stored_bodies, "BRIEFLY_S", 0.05)
    return found


@pytest.fixture
def bodies(rows):
    found = StoredBodies("trainer-0", 1.0)
    yield found
    found.close()


def leader(launcher, bodies):
    rollouts = LiveRollouts(launcher, SimpleNamespace(unit=0), None, budget=100, bodies=bodies)
    return lambda *trained: rollouts._lease(0, trained)


def test_the_leader_fetches_what_the_window_lacks_with_one_client_for_each_start_of_the_store(rows, bodies):
    again = window(GROUPS[:1], lease=3, port=2)
    launcher = Launcher(window(), window(GROUPS[1:], lease=2), again, EndOfStep())
    lease = leader(launcher, bodies)
    threads = torch.get_num_threads()
    assert lease() == Window(tuple(GROUPS), lease=1)
    assert torch.get_num_threads() == threads
    assert lease(1) == Window(tuple(GROUPS[1:]), lease=2)
    assert (rows.connected, rows.closed) == ([addresses(1)], 0)
    assert lease(2) == Window(tuple(GROUPS[:1]), lease=3)
    assert (rows.connected, rows.closed) == ([addresses(1), addresses(2)], 1)
    assert lease(3) == EndOfStep()
    assert [one.trained for one in launcher.asked] == [(), (1,), (2,), (3,)]
    assert all(one.fetches for one in launcher.asked)


def test_a_window_that_has_its_bodies_is_passed_on(rows, bodies):
    whole = Window(tuple(GROUPS), lease=1)
    assert leader(Launcher(whole), bodies)() == whole
    assert not rows.connected


def test_a_unit_that_can_not_reach_the_store_says_so():
    launcher = Launcher(StillWaiting())
    assert leader(launcher, None)() == StillWaiting()
    assert launcher.asked == [Lease(unit=0, step=0, budget=100, trained=())]


def test_a_slow_store_is_waited_for_with_signs_of_life(rows, bodies):
    rows.answers = asyncio.Event()
    launcher = Launcher(window())
    lease = leader(launcher, bodies)
    assert [lease(), lease()] == [StillWaiting(), StillWaiting()]
    assert launcher.asked[1:] == [Heartbeat(unit=0), Heartbeat(unit=0)]
    rows.answers.set()
    assert lease() == Window(tuple(GROUPS), lease=1)
    assert len(launcher.asked) == 3


def test_the_failure_of_the_run_is_heard_while_the_store_is_waited_for(rows, bodies):
    rows.answers = asyncio.Event()
    launcher = Launcher(window())
    lease = leader(launcher, bodies)
    lease()
    launcher.failure = StoreError("the controller has not answered")
    with pytest.raises(StoreError, match="the controller"):
        lease()
    rows.answers.set()
    bodies.wait_briefly()


@pytest.mark.parametrize("body", [None, b"other"], ids=["lost", "damaged"])
def test_a_body_that_is_lost_or_damaged_is_left_to_the_launcher_which_gives_the_window_later(
    rows, bodies, body, capsys
):
    if body is None:
        del rows.rows[0, 1]
    else:
        rows.rows[0, 1] = body
    whole = Window(tuple(GROUPS), lease=7)
    launcher = Launcher(window(lease=7), StillWaiting(), whole)
    lease = leader(launcher, bodies)
    assert lease(6) == StillWaiting()
    assert [one.trained for one in launcher.asked] == [(6,), ()]  # each lease is acknowledged once
    assert launcher.asked[-1] == Lease(unit=0, step=0, budget=100, trained=(), fetches=True, unfetched=7)
    assert "unit 0 leaves lease 7 to the launcher" in capsys.readouterr().err
    assert lease() == whole
    assert launcher.asked[-1].unfetched is None
