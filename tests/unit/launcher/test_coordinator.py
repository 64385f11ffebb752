"""The launcher's side of the control channel: who waits, who is silent.
Requests are made in this process, groups by hand."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from engine.config import Config
from engine.data.loader import PromptLoader
from engine.errors import BadInput, DeadlineError, RatioGapError
from engine.launcher import run_state
from engine.launcher.coordinator import Coordinator
from engine.launcher.liveness import Liveness
from engine.launcher.sample_queue import SampleQueue
from engine.run.folder import RunFolder
from engine.run.trace import Trace
from engine.types import BatchScores, Group, Prompt, Response, Score
from engine.wire.messages import (
    Done,
    EndOfStep,
    Failure,
    Heartbeat,
    Lease,
    Prompts,
    Ready,
    ReplayProgress,
    StartBatch,
    StillWaiting,
    TrainerFailed,
    VerifySync,
    Window,
)
from engine.wire.sealed import seal_group
from engine.wire.store_addresses import StoreAddresses, StoreServer

PROMPT = Prompt("id", "1+1=", "2", (1, 2, 3))
LIMIT_S = 0.4
DISAGREE = Failure.of(RatioGapError("they disagree"))


def group(index):
    response = Response(
        token_ids=(5, 6),
        logprobs=(-0.5, -1.25),
        versions=((0, 0),),
        loss_mask=(True, True),
        finish_reason="stop",
        text="a",
        seed=0,
        instance="instance-0",
    )
    return Group(step=0, index=index, prompt=PROMPT, responses=(response,), scores=(Score(1.0),))


class Rollouts:
    """What a coordinator needs of a service: groups come when the test puts them."""

    def __init__(self):
        self.pool = SimpleNamespace(working=1, failure=None)
        self.producer = self
        self.come = asyncio.Queue()

    async def run(self, step, prompts, put, land=None):
        for _ in prompts:
            if (index := await self.come.get()) is None:
                return  # a mistake of ours: it ends with groups missing
            await put(seal_group(group(index)))


@pytest.fixture
def conduct(tmp_path, tiny_model):
    """A coordinator of two units whose step of so many groups has begun, and where its groups come from."""

    async def begin(groups, store=None, **train):
        config = Config(
            model={"path": str(tiny_model)},
            parallel={"data": 2},
            rollout={"timeout_s": 1.2},
            train={"prompts_per_step": groups, "timeout_s": LIMIT_S, **train},
        )
        loader = PromptLoader([PROMPT] * groups, 0, groups)
        rollouts = Rollouts()
        coordinator = Coordinator(
            config=config,
            folder=RunFolder(tmp_path),
            trace=Trace(tmp_path / "trace", "launcher"),
            loader=loader,
            service=rollouts,
            store=store,
        )
        await coordinator.answer(ready(0))
        await coordinator.answer(StartBatch(step=0))
        return coordinator, rollouts.come

    return begin


def ready(start, prompts=None):
    return Ready(start=start, prompt_position=None, prompts=prompts)


async def work(coordinator, unit, hang=lambda leased: False):
    """Lease and train until the end of the step; the indices of the groups. Stops asking once `hang` says so."""
    mine = []
    trained = ()
    while True:
        reply = await coordinator.answer(Lease(step=0, unit=unit, budget=1, trained=trained))
        trained = (reply.lease,) if isinstance(reply, Window) else ()
        mine += [one.index for one in reply.groups] if isinstance(reply, Window) else []
        if isinstance(reply, EndOfStep) or hang(mine):
            return mine


async def watch(coordinator):
    """As the launcher does, until the coordinator fails."""
    while coordinator.failure is None:
        await coordinator.check()
        await asyncio.sleep(0.02)
    return coordinator.failure


async def test_a_step_ends_for_all_units_also_for_one_that_got_nothing(conduct):
    coordinator, come = await conduct(1)
    units = [asyncio.create_task(work(coordinator, unit)) for unit in (0, 1)]
    watching = asyncio.create_task(watch(coordinator))
    come.put_nowait(0)
    async with asyncio.timeout(5):
        assert sorted(await asyncio.gather(*units)) == [[], [0]]
    assert not watching.done()
    watching.cancel()
    await coordinator.close()


async def test_waiting_for_groups_is_not_silence_however_long(conduct):
    coordinator, come = await conduct(2)
    units = [asyncio.create_task(work(coordinator, unit)) for unit in (0, 1)]
    watching = asyncio.create_task(watch(coordinator))
    for index in (1, 0):
        await asyncio.sleep(3 * LIMIT_S)
        come.put_nowait(index)
    async with asyncio.timeout(5):
        assert sorted(sum(await asyncio.gather(*units), [])) == [0, 1]
    assert not watching.done()
    watching.cancel()
    await coordinator.close()


async def test_a_unit_that_hangs_is_named_although_the_others_ask_on(conduct):
    coordinator, come = await conduct(2)
    come.put_nowait(0)
    assert await work(coordinator, 1, hang=bool) == [0]
    other = asyncio.create_task(work(coordinator, 0))
    async with asyncio.timeout(LIMIT_S + 3):
        failure = await watch(coordinator)
    assert isinstance(failure, DeadlineError)
    assert str(failure).startswith("no sign of life of unit 1 of the trainer in 0.4 s (train.timeout_s); its log: ")
    with pytest.raises(DeadlineError, match="unit 1"):  # it hears of it, and ends
        await other
    await coordinator.close()


async def test_an_error_of_one_unit_reaches_the_others_as_they_wait(conduct, monkeypatch):
    monkeypatch.setattr(run_state, "SIGN_OF_LIFE_S", 60.0)  # nobody asks again meanwhile
    coordinator, _ = await conduct(2, timeout_s=100)
    other = asyncio.create_task(work(coordinator, 0))
    await asyncio.sleep(0.05)
    await coordinator.answer(TrainerFailed(error=DISAGREE))
    with pytest.raises(RatioGapError, match="they disagree"):
        await asyncio.wait_for(other, 20)
    assert isinstance(coordinator.trainer_error, RatioGapError)
    await coordinator.close()


async def test_a_unit_that_is_done_with_its_replay_of_a_step_waits_for_the_others_and_hears_of_their_errors(tmp_path):
    config = Config(parallel={"data": 2})
    coordinator = Coordinator(config, RunFolder(tmp_path), Trace(tmp_path / "trace", "launcher"))

    def replayed(step, unit, done):
        return coordinator.answer(ReplayProgress(step=step, unit=unit, done=done))

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
    await coordinator.answer(TrainerFailed(error=DISAGREE))
    with pytest.raises(RatioGapError, match="they disagree"):
        await first


async def test_a_checkpoint_of_other_prompts_is_refused_before_anything_is_cut(conduct, tmp_path):
    coordinator, _ = await conduct(2)
    ours = (await coordinator.answer(ready(0))).fingerprint
    other = PromptLoader([PROMPT] * 3, 0, 2).fingerprint
    (tmp_path / "steps.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    with pytest.raises(BadInput, match=r"not those that its checkpoint was trained on.*evaluate\.benchmark"):
        await coordinator.answer(ready(1, other))
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 2
    assert await coordinator.answer(ready(1, ours)) == Prompts(ours)
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1
    await coordinator.close()


async def test_a_trainer_may_take_longer_to_get_ready_than_it_may_be_silent_later(tmp_path):
    config = Config(rollout={"timeout_s": 1.2}, train={"timeout_s": LIMIT_S})
    coordinator = Coordinator(config, RunFolder(tmp_path), Trace(tmp_path / "trace", "launcher"))
    await asyncio.sleep(2 * LIMIT_S)
    await coordinator.check()
    assert coordinator.failure is None
    with_keys = r"no sign of life of the trainer in 1.6 s \(train.timeout_s \+ rollout.timeout_s\)"
    async with asyncio.timeout(5):
        with pytest.raises(DeadlineError, match=with_keys):
            raise await watch(coordinator)


def test_a_window_brings_the_scores_of_its_batch(tmp_path):
    coordinator = Coordinator(Config(), RunFolder(tmp_path), Trace(tmp_path / "trace", "launcher"))
    queue = SampleQueue(0, 1)
    queue.batch = BatchScores(((1.0,),), ((2,),))
    queue.put(seal_group(group(0)))
    window = coordinator._next_work(queue, 0, Lease(step=0, unit=0, budget=100, trained=()))
    assert window == Window((seal_group(group(0)),), queue.batch, lease=1)


def test_a_request_that_is_being_answered_is_no_silence():
    silence = Liveness()
    silence.expect(2)
    with silence.answering(0):
        time.sleep(0.1)
        assert silence.longer_than(0.05) == "unit 1 of the trainer"
        silence.excuse(1)
        assert silence.longer_than(0.05) is None
    assert silence.longer_than(0.05) is None
    time.sleep(0.1)
    assert silence.longer_than(0.05) == "the trainer"


async def test_the_comparison_of_weights_is_no_silence_of_the_units_that_wait_for_it(conduct):
    """They have something to do from the start of the batch on;
    the first rank asks for the comparison for all of them."""
    coordinator, come = await conduct(2)

    class Slow:
        def expect(self, expected):
            pass

        async def checked(self):
            await asyncio.sleep(3 * LIMIT_S)

        async def close(self):
            pass

    coordinator._publishing.sync = Slow()
    watching = asyncio.create_task(watch(coordinator))
    async with asyncio.timeout(5):
        assert await coordinator.answer(VerifySync(expected=())) == Done()
    await coordinator.check()
    assert not watching.done()
    come.put_nowait(0)
    assert await work(coordinator, 1, hang=bool) == [0]
    other = asyncio.create_task(work(coordinator, 0))
    async with asyncio.timeout(LIMIT_S + 3):
        # afterwards each has its own clock again
        assert "no sign of life of unit 1 of the trainer" in str(await watching)
    with pytest.raises(DeadlineError, match="unit 1"):
        await other
    await coordinator.close()


async def test_a_generation_that_ends_without_all_groups_fails_the_run(conduct):
    coordinator, come = await conduct(2)
    other = asyncio.create_task(work(coordinator, 0))
    come.put_nowait(0)
    come.put_nowait(None)
    async with asyncio.timeout(5):
        failure = await watch(coordinator)
    assert str(failure) == "step 0: its generation ended with 1 of 2 groups, so the trainer would wait for ever"
    with pytest.raises(type(failure), match="1 of 2 groups"):
        await other
    await coordinator.close()


async def test_a_mistake_in_the_swap_of_weights_is_seen(conduct):
    coordinator, _ = await conduct(1)

    async def swap():
        raise KeyError("a mistake of ours")

    publishing = coordinator._publishing
    publishing._swap = asyncio.create_task(publishing._swap_in_background(swap(), []))
    with pytest.raises(KeyError, match="a mistake of ours"):
        await watch(coordinator)
    await coordinator.close()


async def test_long_work_of_the_trainer_is_no_silence_as_long_as_it_says_so(conduct):
    coordinator, come = await conduct(1)
    come.put_nowait(0)
    await asyncio.gather(work(coordinator, 0), work(coordinator, 1))  # from now on no unit asks for anything
    for _ in range(4):
        await asyncio.sleep(LIMIT_S / 2)
        assert await coordinator.answer(Heartbeat(unit=1)) == Done()
        await coordinator.check()
    assert coordinator.failure is None
    async with asyncio.timeout(5):
        failure = await watch(coordinator)
    assert "no sign of life of the trainer" in str(failure)
    with pytest.raises(DeadlineError):
        await coordinator.answer(Heartbeat(unit=1))
    await coordinator.close()


class Rows:
    """A store of bodies, and how often it was asked for one."""

    addresses = StoreAddresses(StoreServer("controller", "127.0.0.1", {"request": 1}), ())

    def __init__(self):
        self.rows = {}
        self.gets = 0

    async def put(self, step, index, body):
        self.rows[step, index] = body

    async def get(self, step, index):
        self.gets += 1
        return self.rows[step, index]


async def leased(coordinator, **more):
    async with asyncio.timeout(5):
        while True:
            reply = await coordinator.answer(Lease(step=0, unit=0, budget=1, trained=(), **more))
            if not isinstance(reply, StillWaiting):
                return reply
            more.pop("unfetched", None)


async def test_a_unit_that_fetches_bodies_gets_none_from_the_launcher_but_those_that_it_could_not_fetch(conduct):
    rows = Rows()
    coordinator, come = await conduct(1, store=rows)
    come.put_nowait(0)
    window = await leased(coordinator, fetches=True)
    assert (window.store, [one.body for one in window.groups], rows.gets) == (rows.addresses, [b""], 0)
    whole = await leased(coordinator, fetches=True, unfetched=window.lease)
    assert (whole.lease, whole.groups, whole.store, rows.gets) == (window.lease, (seal_group(group(0)),), None, 1)


@pytest.mark.parametrize(("fetches", "record"), [(False, False), (True, True)], ids=["elsewhere", "recorded"])
async def test_the_launcher_gives_bodies_to_units_on_other_nodes_and_where_it_records_them(conduct, fetches, record):
    rows = Rows()
    coordinator, come = await conduct(1, store=rows, record=record)
    come.put_nowait(0)
    window = await leased(coordinator, fetches=fetches)
    assert (window.groups, window.store, rows.gets) == ((seal_group(group(0)),), None, 1)
