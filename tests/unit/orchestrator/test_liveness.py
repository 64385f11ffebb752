"""Who of the trainer is silent, and who waits for whom at the end of a replayed step."""

import asyncio
import time

import pytest

from engine.config import Config
from engine.errors import RatioGapError
from engine.orchestrator.plane import Plane
from engine.run.folder import RunFolder
from engine.run.trace import Trace
from engine.wire.messages import EndOfStep, Failure, ReplayProgress, StageFailed, StillWaiting

DISAGREE = Failure.of(RatioGapError("they disagree"))


def test_a_request_that_is_being_answered_is_no_silence(tmp_path):
    plane = Plane(Config(parallel={"data": 2}), RunFolder(tmp_path), Trace(tmp_path / "trace", "orchestrator"))
    leases = plane.leases
    leases.expect_requests()
    with leases.answering(0):
        time.sleep(0.1)
        assert leases.silent_longer_than(0.05) == "replica group 1 of the trainer"
        with leases.answering(1):
            assert leases.silent_longer_than(0.05) is None
    assert leases.silent_longer_than(0.05) is None
    time.sleep(0.1)
    assert leases.silent_longer_than(0.05) == "the trainer"


async def test_a_unit_that_is_done_with_its_replay_of_a_step_waits_for_the_others_and_hears_of_their_errors(tmp_path):
    config = Config(parallel={"data": 2})
    plane = Plane(config, RunFolder(tmp_path), Trace(tmp_path / "trace", "orchestrator"))

    def replayed(step, replica_group, done):
        return plane.answer(ReplayProgress(step=step, replica_group=replica_group, done=done))

    for step in (0, 1):
        assert await replayed(step, 1, False) == StillWaiting()
        first = asyncio.create_task(replayed(step, 0, True))
        await asyncio.sleep(0.05)
        assert not first.done()
        assert await replayed(step, 1, True) == EndOfStep()
        assert await first == EndOfStep()
    assert await replayed(2, 0, True) == StillWaiting()  # a sign of life
    first = asyncio.create_task(replayed(2, 0, True))
    await asyncio.sleep(0.05)
    await plane.answer(StageFailed(error=DISAGREE))
    with pytest.raises(RatioGapError, match="they disagree"):
        await first
