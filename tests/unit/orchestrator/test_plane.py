"""What the plane answers, who waits, who is silent. Requests are made in this process, rows by hand."""

import asyncio
import re
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from engine.algorithm.alignment import RECENT, WARM_UP
from engine.config import Config
from engine.data.loader import PromptLoader
from engine.errors import BadInput, DeadlineError, RatioGapError, RewardError, ServiceConflict
from engine.orchestrator import run_state
from engine.orchestrator.plane import Plane
from engine.orchestrator.run_events import RunEvents
from engine.run.files import append_line, read_lines
from engine.run.folder import RunFolder
from engine.run.trace import Trace
from engine.wire.columns import pack_values
from engine.wire.messages import (
    AnyRequest,
    Done,
    EndOfRun,
    EndOfStep,
    Failure,
    Heartbeat,
    Lease,
    OpenSync,
    Prompts,
    ReplayProgress,
    Report,
    StageFailed,
    StillWaiting,
    WriteColumns,
    Written,
)
from support.planes import LIMIT_S, PROMPT, Rollouts, leased, plane_of, publish, ready, watch, work
from support.run_folders import FIGURES

DISAGREE = Failure.of(RatioGapError("they disagree"))


async def test_a_step_ends_for_all_units_and_waiting_for_groups_is_not_silence_however_long(conduct):
    """It ends also for a unit that got nothing."""
    for arriving in ([0], [1, 0]):
        plane, come = await conduct(len(arriving))
        replica_groups = [asyncio.create_task(work(plane, replica_group)) for replica_group in (0, 1)]
        watching = asyncio.create_task(watch(plane))
        for index in arriving:
            await asyncio.sleep(3 * LIMIT_S)
            come.put_nowait(index)
        async with asyncio.timeout(5):
            assert sorted(sum(await asyncio.gather(*replica_groups), [])) == sorted(arriving)
        assert not watching.done()
        watching.cancel()


async def test_a_unit_that_hangs_is_named_although_the_others_ask_on(conduct):
    plane, come = await conduct(2)
    come.put_nowait(0)
    assert await work(plane, 1, hang=bool) == [0]
    other = asyncio.create_task(work(plane, 0))
    async with asyncio.timeout(LIMIT_S + 3):
        failure = await watch(plane)
    assert isinstance(failure, DeadlineError)
    assert str(failure).startswith(
        "no sign of life from replica group 1 of the trainer in 0.4 s (train.timeout_s); its log: "
    )
    with pytest.raises(DeadlineError, match="replica group 1"):  # it hears of it, and ends
        await other


async def test_an_error_of_one_unit_reaches_the_others_as_they_wait(conduct, monkeypatch):
    monkeypatch.setattr(run_state, "SIGN_OF_LIFE_S", 60.0)  # nobody asks again meanwhile
    plane, _ = await conduct(2, timeout_s=100)
    other = asyncio.create_task(work(plane, 0))
    await asyncio.sleep(0.05)
    await plane.answer(StageFailed(error=DISAGREE))
    with pytest.raises(RatioGapError, match="they disagree"):
        await asyncio.wait_for(other, 20)
    assert isinstance(plane.trainer_error, RatioGapError)


async def test_a_checkpoint_of_other_prompts_is_refused_before_anything_is_cut(tiny_model, tmp_path):
    config = Config(model={"path": str(tiny_model)}, parallel={"data": 2}, train={"prompts_per_step": 2})
    plane = plane_of(config, tmp_path, Rollouts(), PromptLoader([PROMPT] * 2, 0, 2))
    ours = (await plane.answer(ready(0))).fingerprint
    other = PromptLoader([PROMPT] * 3, 0, 2).fingerprint
    for step in range(2):
        append_line(tmp_path / "steps.jsonl", FIGURES | {"step": step})
    with pytest.raises(BadInput, match=r"differ from those that its checkpoint was trained on.*evaluate\.benchmark"):
        await plane.answer(ready(1, other))
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 2
    assert await plane.answer(ready(1, ours)) == Prompts(ours)
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1


async def test_a_trainer_may_take_longer_to_get_ready_than_it_may_be_silent_later(tmp_path):
    config = Config(rollout={"timeout_s": 1.2}, train={"timeout_s": LIMIT_S})
    plane = Plane(config, RunFolder(tmp_path), Trace(tmp_path / "trace", "orchestrator"))
    await asyncio.sleep(2 * LIMIT_S)
    await plane.check_run()
    assert plane.failure is None
    with_keys = r"no sign of life from the trainer in 1.6 s \(train.timeout_s \+ rollout.timeout_s\)"
    async with asyncio.timeout(5):
        with pytest.raises(DeadlineError, match=with_keys):
            raise await watch(plane)


async def test_a_publish_is_no_silence_of_the_units_that_wait_for_it(conduct):
    """They have something to do from the start of the batch on;
    the first rank asks for all of them."""
    plane, come = await conduct(2)
    plane.service.pool.instances[0].client.delay_s = 3 * LIMIT_S
    watching = asyncio.create_task(watch(plane))
    await plane.answer(OpenSync(version=0))
    await plane.check_run()
    assert not watching.done()
    come.put_nowait(0)
    assert await work(plane, 1, hang=bool) == [0]
    other = asyncio.create_task(work(plane, 0))
    async with asyncio.timeout(LIMIT_S + 3):
        # afterwards each has its own clock again
        assert "no sign of life from replica group 1 of the trainer" in str(await watching)
    with pytest.raises(DeadlineError, match="replica group 1"):
        await other


@pytest.mark.parametrize(
    ("arriving", "said"),
    [
        ([0, None], "step 0: its generation ended with 1 of 2 groups, so the trainer would wait for ever$"),
        (
            ["no index"],
            "step 0: its generation failed, unexpected TypeError: .*the orchestrator's log has the traceback",
        ),
    ],
)
async def test_a_generation_that_lacks_groups_or_fails_by_a_mistake_of_ours_ends_the_run_by_name(
    conduct, arriving, said
):
    plane, come = await conduct(2)
    other = asyncio.create_task(work(plane, 0))
    for index in arriving:
        come.put_nowait(index)
    async with asyncio.timeout(5):
        failure = await watch(plane)
    assert re.match(said, str(failure))
    with pytest.raises(type(failure), match=re.escape(str(failure))):
        await other


async def test_long_work_of_the_trainer_is_no_silence_as_long_as_it_says_so(conduct):
    plane, come = await conduct(1)
    come.put_nowait(0)
    await asyncio.gather(work(plane, 0), work(plane, 1))  # from now on no replica group asks for anything
    for _ in range(4):
        await asyncio.sleep(LIMIT_S / 2)
        assert await plane.answer(Heartbeat(replica_group=1)) == Done()
        await plane.check_run()
    assert plane.failure is None
    async with asyncio.timeout(5):
        failure = await watch(plane)
    assert "no sign of life from the trainer" in str(failure)
    with pytest.raises(DeadlineError):
        await plane.answer(Heartbeat(replica_group=1))


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


# stages -------------------------------------------------------------------------------------------


async def test_the_trainer_gets_a_row_once_a_stage_has_written_and_both_hear_of_the_end(conduct):
    plane, come = await conduct(1, stages={"judge": {"gives": ["mark"]}}, steps=1, timeout_s=100)
    training = asyncio.create_task(work(plane, 0))
    come.put_nowait(0)
    judging = Lease(stage="judge", budget=100, consumer="me")
    async with asyncio.timeout(5):
        window = await plane.answer(judging)
    assert (window.rows[0].names, window.lease_s) == ({"prompt", "responses"}, 60.0)
    assert plane.status()["stages"]["judge"] == {"waiting": 1, "done": 0}
    await asyncio.sleep(0.1)
    assert not training.done()
    mark = pack_values("mark", np.ones(1))
    written = WriteColumns(stage="judge", lease=window.lease, rows=(Written(0, (mark,)),))
    assert [(await plane.answer(written)).new for _ in range(2)] == [True, False]
    async with asyncio.timeout(5):
        assert await training == [0]
        assert await plane.answer(Lease(stage="judge", step=0, budget=100)) == EndOfStep()
        assert await plane.answer(judging) == EndOfRun()
    assert plane.is_over


async def test_a_request_for_what_the_recipe_does_not_have_is_refused(conduct):
    plane, come = await conduct(1, timeout_s=100)
    come.put_nowait(0)
    await asyncio.sleep(0.1)
    wrong = {
        "there is no stage 'judge' in the recipe, whose stages are train": Lease(stage="judge", budget=1),
        "replica group 2 of the stage 'train', which has 2": Lease(step=0, replica_group=2, budget=1),
        "replica group -1 of the stage 'train'": Lease(step=0, replica_group=-1, budget=1),
        "there is no lease 7": Lease(step=0, replica_group=0, budget=1, done=(7,)),
        "columns more: the stage 'train' gets": Lease(step=0, replica_group=0, budget=1, columns=("more",)),
        "there is no lease 9": WriteColumns(stage="train", lease=9, rows=()),
    }
    for said, request in wrong.items():
        with pytest.raises((BadInput, ServiceConflict), match=said):
            await plane.answer(request)
    assert (await leased(plane)).rows[0].index == 0, "what was refused had no effect"


async def test_a_trainer_outside_that_begins_again_gets_the_step_again(conduct):
    plane, come = await conduct(2, trains=False)
    for index in (1, 0):
        come.put_nowait(index)
    assert sorted(await work(plane, None)) == [0, 1]
    await publish(plane, 0)
    assert sorted(await work(plane, None)) == [0, 1]
    await publish(plane, 1)
    assert plane.status()["steps"] == []
    assert await plane.answer(Lease(step=0, budget=1)) == EndOfStep()


async def test_a_plane_of_instances_answers_every_request(conduct):
    plane, _ = await conduct(1)
    assert set(plane.answers()) == set(get_args(AnyRequest))


GIVEN_BY_THE_PLANE = {"step", "weight_version", "pool_size", "rollout_s", "reward_tried", "prompts_used"} | {
    "sync_difference",
    "tokens_per_s_per_device",
}


async def reporting(conduct, tmp_path, **tables):
    """A plane to which steps can be reported, the run's folder, and the figures of a step."""
    plane, _ = await conduct(1)
    plane.config = Config(**tables)
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.responses.mkdir()
    plane.service.notices = RunEvents(folder.add_notice)
    plane.service.tokenizer = SimpleNamespace(decode=str, pieces=str)
    return plane, folder, {name: value for name, value in FIGURES.items() if name not in GIVEN_BY_THE_PLANE}


async def report_cosines(conduct, tmp_path, cosines, **algorithm):
    """The notices of a run whose steps report these cosines; None is a step without one."""
    plane, folder, figures = await reporting(conduct, tmp_path, algorithm={"gradient_control": "gac", **algorithm})
    for step, cosine in enumerate(cosines):
        await plane.answer(Report(step=step, figures=figures | {"grad_cosine": cosine}))
    assert [line.get("grad_cosine") for line in read_lines(folder.steps)] == cosines
    return [(line["stage"], line["text"]) for line in read_lines(folder.notices)] if folder.notices.exists() else []


@pytest.mark.parametrize(("shared", "devices"), [(True, 1), (False, 2)])
async def test_the_speed_of_a_device_counts_a_shared_one_once(conduct, tmp_path, shared, devices):
    rollout = {"engine": "vllm", "devices": [0], "share_devices": shared, "vllm": {"gpu_memory_utilization": 0.4}}
    plane, _, figures = await reporting(conduct, tmp_path, rollout=rollout)
    await plane.answer(Report(step=0, figures=figures | {"trained_tokens": 600, "step_s": 3.0}))
    assert plane.last["pool_size"] == 1
    assert plane.last["tokens_per_s_per_device"] == 200 / devices


@pytest.mark.parametrize(("timed_out", "step", "stops"), [(32, 0, True), (31, 0, False), (32, 1, False)])
async def test_a_run_whose_first_scores_all_time_out_stops_after_the_step(conduct, tmp_path, timed_out, step, stops):
    plane, folder, figures = await reporting(conduct, tmp_path, train={"prompts_per_step": 4})
    await plane.answer(Report(step=step, figures=figures | {"reward_timeouts": timed_out}))
    assert [line["step"] for line in read_lines(folder.steps)] == [step]
    assert isinstance(plane.failure, RewardError) is stops
    if stops:
        assert str(plane.failure).startswith("all 32 scores of the first step timed out (reward.timeout_s = 10)")


@pytest.mark.parametrize(
    ("low", "later", "end"),
    [(None, 0.5, 0.1), (0.6, 0.5, None), (0.4, 0.5, 0.4), ("auto", 0.5, None), ("auto", 0.9, 0.6)],
)
async def test_a_run_says_once_that_its_gradients_have_left_the_on_policy_range(conduct, tmp_path, low, later, end):
    """With "auto" it ends at the mean of the first cosines (0.5) plus their standard deviation (0.1)."""
    first = [None, *[0.02, -0.02] * RECENT] if low is None else [0.4, 0.6] * (WARM_UP // 2)
    range_ = {} if low is None else {"gac_low": low, "gac_high": 0.9 if low != "auto" else low}
    told = await report_cosines(conduct, tmp_path, [*first, *[later] * RECENT], **range_)
    assert len(told) == (end is not None)
    if end is not None:
        assert told[0][0] == "training"
        assert f"on average over {RECENT} steps, has left its on-policy range (up to {end:g}; GAC §3.2)" in told[0][1]
    if low is None:  # the first whose last 20 steps have a mean above 0.1: 4 of 0.5, 16 of 0.02
        assert told[0][1].startswith(f"step {2 * RECENT + 4}: the |cosine| of consecutive gradients, 0.116 ")
