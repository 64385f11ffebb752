"""Where the loop's groups come from."""

import asyncio
import threading

import pytest

from engine.client.ranks import Ranks
from engine.errors import BadInput, MetronomeError
from engine.trainer.rollouts import LiveRollouts
from engine.wire.messages import EndOfStep, Lease, Window
from support.planes import conduct  # noqa: F401
from support.runs import config_of

GROUPS = 12


class Asked:
    """A connection to a plane that runs in the event loop of the test."""

    def __init__(self, plane):
        self.plane = plane
        self._loop = asyncio.get_running_loop()
        self.leases = []

    def ask(self, request):
        if isinstance(request, Lease):
            self.leases.append(request)
        return asyncio.run_coroutine_threadsafe(self.plane.answer(request), self._loop).result(10)


class Ahead:
    """Notes which groups are prepared, and by which thread."""

    def __init__(self, failing=None):
        self.groups = []
        self.threads = set()
        self.failing = failing
        self.came = threading.Condition()

    def __call__(self, window):
        with self.came:
            self.groups += [group.index for group in window]
            self.threads.add(threading.current_thread())
            self.came.notify_all()
        if self.failing in self.groups:
            raise BadInput("my_advantage failed")

    def wait_for(self, count):
        with self.came:
            assert self.came.wait_for(lambda: len(self.groups) >= count, 10)


@pytest.fixture
async def asked(conduct):  # noqa: F811
    """A plane with all groups of a step of two replica groups; each window has one group, of nine tokens."""
    plane, come = await conduct(GROUPS)
    for index in range(GROUPS):
        come.put_nowait(index)
    return Asked(plane)


def rollouts_of(asked):
    config = config_of({"train.micro_batch_tokens": 9})
    return LiveRollouts(control=asked, ranks=Ranks(), publisher=None, config=config, prefetch=True)


async def test_the_next_window_is_leased_and_prepared_while_one_is_trained(asked):
    ahead = Ahead()

    def train():
        trained = []
        for window in rollouts_of(asked).windows(0, ahead):
            trained += [group.index for group in window]
            if len(trained) == 1:
                ahead.wait_for(1)  # and the first window is not trained yet
                assert not any(lease.done for lease in asked.leases)
        return trained

    async def other_replica_group():
        done = ()
        while not isinstance(
            reply := await asked.plane.answer(Lease(step=0, replica_group=1, budget=9, done=done)), EndOfStep
        ):
            done = (reply.lease,) if isinstance(reply, Window) else ()
            await asyncio.sleep(0.01)

    trained, _ = await asyncio.gather(asyncio.to_thread(train), other_replica_group())
    assert set(ahead.groups) <= set(trained)
    assert threading.main_thread() not in ahead.threads
    assert len(set(trained)) == len(trained)
    said = [number for lease in asked.leases for number in lease.done]
    assert sorted(set(said)) == sorted(said)
    assert len(said) == len(trained)


async def test_a_mistake_in_what_is_prepared_ends_the_step_once_the_window_before_is_trained(asked):
    trained = []

    def train():
        for window in rollouts_of(asked).windows(0, Ahead(failing=1)):
            trained.extend(group.index for group in window)

    with pytest.raises(MetronomeError, match="my_advantage failed"):
        await asyncio.to_thread(train)
    assert trained == [0]
