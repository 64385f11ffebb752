"""Who is in the pool: instances come late, fall silent, come back, leave. Over real sockets;
they are scripted, the sync too. Random sequences of events are in test_pool_states.py."""

import asyncio
import time
from functools import partial

import pytest

from engine.errors import MetronomeError, ProcessDied
from engine.orchestrator.pool.instance import SILENCES
from engine.orchestrator.pool.instance_client import Abandoned
from engine.orchestrator.publish.publishes import Publishes
from engine.orchestrator.run_events import RunEvents
from engine.orchestrator.run_state import RunState
from engine.orchestrator.stages import stages_of
from engine.orchestrator.steps import Steps
from engine.wire.messages import OpenSync
from engine.wire.rollout_messages import ROLLOUT_PROTOCOL
from support.pool_world import worlds
from support.scripted import Scripted, accept, publishing, until


@pytest.fixture
def world(tmp_path, monkeypatch):
    return partial(worlds(tmp_path, monkeypatch), heartbeat_s=0.3)


@pytest.mark.parametrize(("spoken", "said"), [(1, "speaks version 1"), (None, "speaks an unnamed version")])
async def test_an_instance_of_another_protocol_is_refused_by_name(world, spoken, said):
    async with world(synced=True) as w:
        a, one = await w.join("a")
        a.protocol = spoken
        await until(lambda: one.state == "gone", "its end")
        assert one.reason == f"{said} of the rollout protocol, not {ROLLOUT_PROTOCOL}"
        assert w.pool.find_instance("a") is None


async def wait_for_member(pool):
    return await pool.wait_for(lambda: pool.members() or None)


async def test_an_instance_waits_for_its_check_and_then_for_weights(world):
    """Also one that fell silent meanwhile."""
    async with world(synced=True) as w:
        a, one = await w.join("a")
        await until(lambda: one.met, "its answer")
        assert w.pool.members() == []
        a.silent = True
        await until(lambda: one.state == "out", "its silence")
        waiting = asyncio.create_task(wait_for_member(w.pool))
        a.silent = False
        await until(lambda: one.state == "starting", "its return")
        assert not waiting.done()
        w.pool.check_arrivals(accept)
        assert await asyncio.wait_for(waiting, 5) == [one]
        assert (one.state, w.pool.serving) == ("starting", 0)
        async with publishing(w.pool, 0):
            await until(lambda: w.pool.serving, "its weights")


async def test_an_instance_is_checked_once_and_given_up_when_it_fails_three_times(world):
    checked = []

    async def check(instance):
        checked.append(instance.name)
        if instance.name == "bad" or len(checked) < 2:
            raise MetronomeError("a weight differs")

    async with world(synced=True) as w, publishing(w.pool, 1, check):
        a, one = await w.join("a")
        await until(lambda: one.state == "serving", "its second check")
        a.silent = True
        await until(lambda: one.state == "out", "its silence")
        a.silent = False
        await until(lambda: one.state == "serving", "its return")
        assert checked == ["a", "a"]
        _, bad = await w.join("bad")
        await until(lambda: bad.state == "gone", "the end")
        assert bad.reason == "given up after it was left out 3 times in a row: a weight differs"
        assert checked.count("bad") == 3


async def test_an_instance_that_is_silent_whenever_it_is_checked_or_updated_is_left_out_but_given_up_late(world):
    """As on a machine that is busy with something else: the pool ends these calls itself, the instance fails none. One
    that does nothing else has to end, or a run with no other would wait for it for ever."""

    async def hangs(instance):
        await asyncio.Event().wait()

    async with world(synced=True) as w:
        a, one = await w.join("a")
        publishes = Publishes(
            config=w.pool.config,
            pool=w.pool,
            probe=None,
            steps=Steps(stages_of(w.pool.config, None)),
            run_state=RunState(),
            trace=w.trace,
        )
        for times in range(8):
            w.pool.check_arrivals(hangs if times < 4 else accept)
            await until(lambda: one.state == "starting" and one.met, "its return")
            if times >= 4:
                opening = asyncio.create_task(publishes.open(OpenSync(version=0)))
                await until(lambda: one.updating, "an update")
            a.silent = True
            await until(lambda: one.state == "out", "its silence")
            a.silent = False
            if times >= 4:
                await asyncio.wait_for(opening, 5)
        assert "no answer for" in one.reason
        assert one in w.pool.instances
        for _ in range(SILENCES):
            w.pool.leave_out(one, Abandoned("no answer for 5 s"))
        assert one.reason == "given up after it was silent 12 times in a row: no answer for 5 s"


async def test_a_wrong_address_holds_up_no_weight_update(world):
    async with world(synced=True) as w:
        w.pool.check_arrivals(accept)
        one = w.pool.enter("nobody", "http://127.0.0.1:9")
        assert w.pool.members() == []
        _, good = await w.join("a")
        async with asyncio.timeout(5):
            assert await wait_for_member(w.pool) == [good]
            await w.pool.wait_for_checks()
        await until(lambda: one.state == "out", "its silence")


async def test_an_instance_that_was_started_again_behind_its_address_is_brought_to_the_weights(world):
    async with world(synced=True) as w, publishing(w.pool, 1):
        a, one = await w.join("a")
        await until(lambda: one.state == "serving", "it")
        a.version = 0
        await until(lambda: a.version == 1, "its update")
        assert one.reason == "holds weight version 0, but was given 1: was it restarted?"
        await until(lambda: one.state == "serving", "its return")


async def test_leaving_finishes_what_it_holds_and_gets_nothing_new(world):
    async with world() as w:
        a, one = await w.join("a")
        b, _ = await w.join("b")
        # on a busy machine it takes a while until all eight have come
        a.delay_s = 0.5
        b.delay_s = 0.1
        running = asyncio.create_task(w.run())
        await until(lambda: a.running == 8, "work")
        w.pool.leave(one)
        assert one.state == "draining"
        assert one not in w.pool.members()
        await running
        w.check_complete()
        assert len(a.seeds) == 8  # all finished, none sent again
        assert one.state == "gone"
        assert w.pool.find_instance("a") is None


async def test_a_load_that_was_read_before_an_update_says_nothing_of_the_version_after_it(world):
    class Late(Scripted):
        held = asyncio.Event()

        async def load(self, request):
            answer = await super().load(request)
            if self.version == 1:
                self.held.set()
                await until(lambda: self.version == 2, "the update")
            return answer

    async with world(synced=True, heartbeat_s=6) as w, publishing(w.pool, 1) as given:
        a, one = await w.join("a", Late())
        await until(lambda: one.state == "serving" and a.held.is_set(), "a load that is read and not answered")
        before = one.load
        one.record_version(2)
        a.version = given.version = 2
        await until(lambda: one.load is not before, "the late answer")
        assert (one.load.weight_version, one.version, one.state, one.reason) == (1, 2, "serving", "")


async def test_an_address_that_never_answers_but_joins_again_and_again_holds_up_no_failure(world):
    async with world(synced=True, wait_s=0.2, timeout_s=1.0) as w:

        async def joins():
            while True:
                if w.pool.find_instance("far") is None:
                    w.pool.enter("far", "http://127.0.0.1:9")
                await asyncio.sleep(0.02)

        joining = asyncio.create_task(joins())
        try:
            with pytest.raises(ProcessDied, match=r"no rollout instance has joined: waited 1 s.*; far "):
                await asyncio.wait_for(wait_for_member(w.pool), 15)
        finally:
            joining.cancel()


async def test_the_wait_for_the_first_begins_when_the_trainer_is_ready_and_is_as_long_as_a_start(world):
    told = []
    async with world(synced=True, wait_s=0.2, timeout_s=1.0) as w:
        ready = asyncio.Event()
        w.pool.needed = ready.is_set
        w.pool.how_to_join = "metronome serve RECIPE --join RUN"
        w.pool._notices = RunEvents(lambda stage, text: told.append(text))
        waiting = asyncio.create_task(wait_for_member(w.pool))
        await asyncio.sleep(1.5)
        assert not waiting.done()
        assert told == [
            "the run waits for the first instance, for up to 1 s (rollout.timeout_s), counted from when the trainer "
            "has loaded its models. Start one with: metronome serve RECIPE --join RUN"
        ]
        ready.set()
        began = time.monotonic()
        with pytest.raises(
            ProcessDied, match=r"has joined: waited 1 s for the first \(rollout\.timeout_s\); none has joined"
        ):
            await waiting
        assert time.monotonic() - began > 0.9
        assert "up to 1 s (rollout.timeout_s). Start one with: metronome serve RECIPE" in told[1]


async def test_one_that_left_before_the_trainer_was_ready_is_waited_for_from_then_on(world):
    async with world(synced=True, wait_s=0.6) as w:
        ready = asyncio.Event()
        w.pool.needed = ready.is_set
        _, one = await w.join("a")
        await until(lambda: one.met, "its answer")
        w.pool.leave(one)
        await asyncio.sleep(1.0)
        assert w.pool.failure is None
        ready.set()
        with pytest.raises(ProcessDied, match=r"no rollout instance is left: waited 0\.6 s for one .*; a left"):
            await asyncio.wait_for(wait_for_member(w.pool), 5)


@pytest.mark.parametrize(("gib", "met", "expected"), [
    (0, False, (40.0, "rollout.timeout_s")), (0, True, (30.0, "rollout.wait_s")),
    (3, False, (40.0, "rollout.timeout_s")), (3, True, (30.72, "the time to load the model")),
    (64, False, (655.36, "the time to load the model")), (64, True, (655.36, "the time to load the model")),
])  # fmt: skip
async def test_the_run_waits_for_an_instance_at_least_as_long_as_its_model_takes_to_load(
    gib, met, expected, world, tmp_path
):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(gib * 2**30)
    async with world(timeout_s=40) as w:
        w.pool.lived = met
        assert w.pool.patience == expected
        assert w.pool.start_s == max(40.0, gib * 10.24)
