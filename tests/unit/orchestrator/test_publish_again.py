"""When the plane has the trainer publish a version again, and what it waits for no longer once no instance serves."""

import asyncio
from types import SimpleNamespace

import pytest

from engine.errors import ServiceConflict
from engine.wire.messages import (
    EndOfStep,
    FinishSync,
    Lease,
    MayPublish,
    OpenSync,
    PublishAgain,
    StillWaiting,
    VerifySync,
    Window,
)
from support.planes import work


class Waiting:
    takes_prompts = False


WAITING = Waiting()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("engine.orchestrator.run_state.SIGN_OF_LIFE_S", 0.05)


@pytest.fixture
def begin(conduct):
    """A plane whose weights of version 0 are verified, of which `serving` instances and one that waits are left."""

    async def make(groups, serving=0, took_s=60.0, **train):
        plane, come = await conduct(groups, **train)
        publishing = plane._publishing
        publishing.verified = 0
        publishing._took_s = took_s
        plane.service.pool.serving = serving
        plane.service.pool.members = lambda: [WAITING]
        return plane, come, plane.service.pool

    return make


async def asked(plane, replica_group=0, **more):
    return await plane.answer(Lease(step=0, replica_group=replica_group, budget=10**6, **more))


async def test_every_replica_group_is_told_and_none_gets_a_window_before_the_version_is_opened(begin):
    plane, come, pool = await begin(2)
    assert await asked(plane) == PublishAgain(0)
    come.put_nowait(0)
    await asyncio.sleep(0.1)
    pool.serving = 1
    assert await asked(plane, 1) == PublishAgain(0)
    assert await asked(plane) == PublishAgain(0)
    pool.members = list
    plane._publishing.goes_again = False  # it was opened
    assert isinstance(await asked(plane), Window)
    await plane.close()


async def test_it_never_goes_again_while_a_replica_group_trains(begin):
    """That one would meet the others in a collective of another kind."""
    plane, come, pool = await begin(2)
    pool.members = list
    come.put_nowait(0)
    await asyncio.sleep(0.1)
    window = await asked(plane)
    pool.members = lambda: [WAITING]
    assert [await asked(plane, 1), await asked(plane, ahead=True)] == [StillWaiting()] * 2
    assert await asked(plane, done=(window.lease,)) == PublishAgain(0)
    assert await asked(plane, 1) == PublishAgain(0)
    await plane.close()


@pytest.mark.parametrize(
    ("serving", "took_s", "waiting", "changes", "again"),
    [
        (0, 60.0, True, {}, True),
        (1, 60.0, True, {}, False),  # the trainer has waited for less than a publish takes
        (1, 0.0, True, {}, True),
        (0, 60.0, False, {}, False),
        (0, 60.0, True, {"_is_open": True}, False),
        (0, 60.0, True, {"_unverified": True}, False),
        (0, 60.0, True, {"verified": None}, False),
        (0, 60.0, True, {"verified": 1, "version": 1}, False),  # the step is over
    ],
)
async def test_it_goes_again_only_to_instances_that_wait_and_never_within_a_publish(
    begin, serving, took_s, waiting, changes, again
):
    plane, _, pool = await begin(2, serving, took_s)
    pool.members = lambda: [WAITING] * waiting
    for name, value in changes.items():
        setattr(plane._publishing, name, value)
    assert isinstance(await asked(plane), PublishAgain) == again
    await plane.close()


async def test_a_step_whose_rows_are_trained_ends_though_an_instance_waits(begin):
    plane, come, pool = await begin(2)
    pool.members = list
    for index in range(2):
        come.put_nowait(index)
    pairs = await asyncio.wait_for(asyncio.gather(work(plane, 0), work(plane, 1)), 5)
    assert sorted(pairs[0] + pairs[1]) == [0, 1]
    pool.members = lambda: [WAITING]
    assert isinstance(await asked(plane), EndOfStep)
    await plane.close()


@pytest.mark.parametrize(("serving", "now"), [(1, False), (0, True)])
async def test_the_next_version_waits_for_the_batches_in_flight_as_long_as_an_instance_serves(begin, serving, now):
    """Without one the version that they need is lost, since the policy has moved on."""
    plane, _, _ = await begin(2, serving, mode="one_step_off")
    plane._publishing._check_version = lambda version: None
    assert (await plane.answer(MayPublish(version=1))).now == now
    await plane.close()


async def test_staged_weights_wait_for_the_batches_in_flight_as_long_as_an_instance_serves(begin):
    """Without one they are given up at once: the trainer waits for rows that nobody samples, and publishes again."""
    plane, _, pool = await begin(2, serving=1, mode="one_step_off", weights={"staged": True})
    publishing = plane._publishing
    publishing._offered = 1
    publishing._is_open = True
    swapped = []

    async def swap(*given):
        swapped.append(given)

    publishing.sync = SimpleNamespace(
        finish_sync=swap, wait_until_checked=swap, expect_logprobs=list, is_awaited=True, close=swap
    )
    await plane.answer(FinishSync(version=1))
    await plane.answer(VerifySync(expected=()))
    await asyncio.sleep(0.2)
    assert (swapped, publishing.verified) == ([], 0)
    assert await plane.answer(Lease(step=1, replica_group=0, budget=1)) == StillWaiting()
    pool.serving = 0
    await asyncio.sleep(0.2)
    assert len(swapped) == 2
    assert await plane.answer(Lease(step=1, replica_group=0, budget=1)) == PublishAgain(1)
    await plane.close()


async def test_no_version_but_the_last_goes_again(begin):
    plane, _, _ = await begin(2)
    plane._publishing._check_version = lambda version: None
    with pytest.raises(ServiceConflict, match="weight version 1 can't go again: version 0 was published last"):
        await plane.answer(OpenSync(version=1, again=True))
    await plane.close()
