"""When the plane has the trainer publish a version again, and what it waits for no longer once no instance serves."""

import asyncio
import time

import pytest

from engine.errors import ServiceConflict
from engine.orchestrator import run_state
from engine.wire.messages import (
    EndOfStep,
    FinishSync,
    Lease,
    MayPublish,
    OpenSync,
    PublishAgain,
    PutPrompts,
    StillWaiting,
    VerifySync,
    Window,
)
from support.planes import enter, publish, watch, work


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(run_state, "SIGN_OF_LIFE_S", 0.05)


@pytest.fixture
def begin(conduct):
    """A plane in step 0, where its groups come from, and its instance, which serves version 0."""

    async def make(groups, **train):
        plane, come = await conduct(groups, **train)
        return plane, come, *plane.service.pool.instances

    return make


def lose(plane, instance):
    plane.service.pool.remove_instance(instance, "its process ended")


async def asked(plane, replica_group=0, **more):
    return await plane.answer(Lease(step=0, replica_group=replica_group, budget=10**6, **more))


async def test_every_replica_group_is_told_and_gets_its_windows_once_the_version_has_come_again(begin):
    plane, come, first = await begin(2)
    lose(plane, first)
    assert await asked(plane) == StillWaiting(), "no instance is there that could get it"
    second = enter(plane, "second")
    assert await asked(plane) == PublishAgain(0)
    come.put_nowait(0)
    await asyncio.sleep(0.1)
    assert [await asked(plane, 1), await asked(plane)] == [PublishAgain(0)] * 2
    await publish(plane, 0, again=True)
    assert (second.state, second.version) == ("serving", 0)
    assert isinstance(await asked(plane), Window)


async def test_it_never_goes_again_while_a_replica_group_trains(begin):
    """That one would meet the others in a collective of another kind."""
    plane, come, first = await begin(2)
    come.put_nowait(0)
    await asyncio.sleep(0.1)
    window = await asked(plane)
    lose(plane, first)
    enter(plane, "second")
    assert [await asked(plane, 1), await asked(plane, ahead=True)] == [StillWaiting()] * 2
    assert await asked(plane, done=(window.lease,)) == PublishAgain(0)
    assert await asked(plane, 1) == PublishAgain(0)


async def test_while_others_serve_it_goes_again_once_the_trainer_has_idled_as_long_as_a_publish_takes(begin):
    plane, _, first = await begin(2)
    await plane.answer(OpenSync(version=0))  # a trainer that was restarted
    await asyncio.sleep(0.3)
    await plane.answer(FinishSync(version=0))
    await plane.answer(VerifySync(expected=()))
    began = time.monotonic()
    second = enter(plane, "second")
    while (reply := await asked(plane)) == StillWaiting():
        pass
    assert reply == PublishAgain(0)
    assert 0.3 <= time.monotonic() - began < 3.0
    await publish(plane, 0, again=True)
    assert [one.state for one in (first, second)] == ["serving"] * 2


async def test_it_never_goes_again_within_a_publish_nor_in_a_step_that_has_other_weights(begin):
    plane, _, first = await begin(2)
    await plane.answer(OpenSync(version=0))
    lose(plane, first)
    enter(plane, "second")
    assert await asked(plane) == StillWaiting()
    await plane.answer(FinishSync(version=0))
    assert await asked(plane) == StillWaiting()
    await plane.answer(VerifySync(expected=()))
    assert await plane.answer(Lease(step=1, replica_group=0, budget=1)) == StillWaiting()
    assert await asked(plane) == PublishAgain(0)


async def test_a_step_whose_rows_are_trained_ends_though_an_instance_waits(begin):
    plane, come, first = await begin(2)
    for index in range(2):
        come.put_nowait(index)
    pairs = await asyncio.wait_for(asyncio.gather(work(plane, 0), work(plane, 1)), 5)
    assert sorted(pairs[0] + pairs[1]) == [0, 1]
    lose(plane, first)
    enter(plane, "second")
    assert isinstance(await asked(plane), EndOfStep)


async def ended(begin, **train):
    """A plane as `begin` makes it, whose trainer has ended step 0 while batch 1 is in flight."""
    plane, come, first = await begin(1, mode="one_step_off", **train)
    come.put_nowait(0)
    await asyncio.gather(work(plane, 0), work(plane, 1))
    await plane.answer(PutPrompts(step=1))
    return plane, first


async def test_the_next_version_waits_for_the_batches_in_flight_as_long_as_an_instance_serves(begin):
    """Without one the version that they need is lost, since the policy has moved on."""
    plane, first = await ended(begin)
    assert not (await plane.answer(MayPublish(version=1))).now
    lose(plane, first)
    assert (await plane.answer(MayPublish(version=1))).now


async def test_staged_weights_wait_for_the_batches_in_flight_as_long_as_an_instance_serves(begin):
    """Without one they are given up at once: the trainer waits for rows that nobody samples, and publishes again."""
    plane, first = await ended(begin, weights={"staged": True})
    await publish(plane, 1)
    second = enter(plane, "second")
    await asyncio.sleep(0.2)
    assert (first.version, plane.status()["version"]) == (0, 0)
    assert await plane.answer(Lease(step=1, replica_group=0, budget=1)) == StillWaiting()
    lose(plane, first)
    await asyncio.sleep(0.2)
    assert (second.version, plane.status()["version"]) == (None, 1), "no instance holds it"
    assert await plane.answer(Lease(step=1, replica_group=0, budget=1)) == PublishAgain(1)


async def test_a_mistake_of_ours_in_a_swap_in_the_background_is_seen(begin):
    plane, first = await ended(begin, weights={"staged": True})
    await publish(plane, 1)
    first.client.call = None
    come = plane.service.producer.come
    come.put_nowait(0)
    with pytest.raises(TypeError, match="not callable"):
        await watch(plane)


async def test_no_version_but_the_last_goes_again(begin):
    plane, _ = await ended(begin)
    with pytest.raises(ServiceConflict, match="weight version 1 can't go again: version 0 was published last"):
        await plane.answer(OpenSync(version=1, again=True))
