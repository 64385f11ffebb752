"""Who is in the pool: instances come late, fall silent, come back, leave. Over real sockets;
they are scripted, the sync too."""

import asyncio
import time

import pytest

from engine.errors import MetronomeError, ProcessDied
from engine.orchestrator.run_events import RunEvents
from engine.run.trace import read_spans
from engine.wire.protocol_version import ROLLOUT_PROTOCOL
from engine.wire.rollout_messages import GetHealth
from support.pool_world import PROMPTS, worlds
from support.scripted import Scripted, Sync, until


@pytest.fixture
def world(tmp_path, monkeypatch):
    return worlds(tmp_path, monkeypatch)


async def test_a_silent_instance_loses_what_it_holds_and_comes_back_through_catch_up(world):
    async with world(synced=True) as w:
        w.pool.sync = Sync(version=3)
        a, one = await w.join("a")
        b, _ = await w.join("b")
        await until(lambda: w.pool.serving == 2, "both")
        a.delay_s = 30
        b.delay_s = 0.01
        running = asyncio.create_task(w.run())
        await until(lambda: a.running > 0, "work")
        a.silent = True
        await running
        w.check_complete()
        assert one.state == "silent"
        assert "no answer for" in one.reason
        a.silent = False
        await until(lambda: one.state == "serving", "its return")
        assert w.pool.sync.caught_up == [("a", 3), ("b", 3), ("a", 3)]


@pytest.mark.parametrize(("spoken", "said"), [(1, "speaks version 1"), (None, "speaks an unnamed version")])
async def test_an_instance_of_another_protocol_is_refused_by_name(world, spoken, said):
    async with world(synced=True) as w:
        w.pool.sync = Sync(version=3)
        a, one = await w.join("a")
        a.protocol = spoken
        await until(lambda: one.state == "gone", "its end")
        assert one.reason == f"{said} of the rollout protocol, not {ROLLOUT_PROTOCOL}"
        assert w.pool.find_instance("a") is None


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


async def test_one_that_asks_to_leave_in_an_update_is_in_it_until_it_ends_and_is_then_gone(world):
    """Also in one that begins again: it would stay paused, and in the pool, for ever."""
    async with world(synced=True) as w:
        w.pool.sync = Sync(version=None)
        _, one = await w.join("a")
        await until(lambda: one.met, "it")
        one.begin_update()
        w.pool.leave(one)
        assert (one.state, w.pool.members()) == ("updating", [one])
        w.pool.admit_instance(one)
        assert (one.state, w.pool.members()) == ("gone", [])


async def test_a_late_instance_waits_for_the_first_publish(world):
    async with world(synced=True) as w:
        w.pool.sync = Sync(version=None)
        _, one = await w.join("a")
        await asyncio.sleep(0.4)
        assert (one.state, w.pool.members(), w.pool.serving) == ("starting", [one], 0)
        one.record_version(0)
        w.pool.admit_instance(one)
        w.pool.sync.version = 0
        await asyncio.sleep(0.2)
        assert (w.pool.serving, w.pool.sync.caught_up) == (1, [])


async def test_the_first_publish_goes_on_when_a_silent_instance_answers_again(world):
    async with world(synced=True) as w:
        w.pool.sync = Sync(version=None)
        a, one = await w.join("a")
        await until(lambda: one.met, "it")
        a.silent = True
        await until(lambda: one.state == "silent", "its silence")
        waiting = asyncio.create_task(w.pool.wait_for_member())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        a.silent = False
        await asyncio.wait_for(waiting, 5)
        assert w.pool.members() == [one]


async def test_a_wrong_address_holds_up_no_weight_update(world):
    async with world(synced=True) as w:
        w.pool.sync = Sync(version=None)
        one = w.pool.enter("nobody", "http://127.0.0.1:9")
        assert w.pool.members() == []
        _, good = await w.join("a")
        async with asyncio.timeout(5):
            await w.pool.wait_for_member()
        assert w.pool.members() == [good]
        await until(lambda: one.state == "silent", "its silence")


async def test_an_instance_catches_up_again_when_the_version_moved_on_meanwhile(world):
    async with world(synced=True) as w:

        class Moving(Sync):
            async def catch_up(self, instance):
                assert instance not in w.pool.members()  # it does so on its own
                await super().catch_up(instance)
                self.version = min(self.version + 1, 6)  # a publish was finished meanwhile

        w.pool.sync = Moving(version=4)
        _, one = await w.join("a")
        await until(lambda: one.state == "serving", "it")
        assert w.pool.sync.caught_up == [("a", 4), ("a", 5), ("a", 6)]
        assert one.version == 6


async def test_an_instance_that_can_not_be_brought_to_the_weights_is_tried_again_then_given_up(world):
    async with world(synced=True) as w:
        w.pool.sync = Sync(version=1, fails=2, error=MetronomeError("a checksum differs"))
        _, one = await w.join("a")
        await until(lambda: one.state == "serving", "the third attempt")
        w.pool.sync = Sync(version=1, fails=99, error=MetronomeError("a checksum differs"))
        _, two = await w.join("b")
        await until(lambda: two.state == "gone", "the end")
        assert two.reason == "given up after 3 attempts to load the weights: a checksum differs"
        assert w.pool.sync.fails == 99 - 3


async def test_an_excluded_instance_forgets_its_version(world):
    """Half of the next version may be in it already."""
    async with world(synced=True) as w:
        w.pool.sync = Sync(version=1)
        _, one = await w.join("a")
        await until(lambda: one.state == "serving", "it")
        w.pool.exclude_instance(one, "its transfer broke")
        assert (one.state, one.reason, one.version) == ("silent", "its transfer broke", None)
        await until(lambda: one.state == "serving", "its return")
        assert w.pool.sync.caught_up == [("a", 1), ("a", 1)]


async def test_an_instance_that_was_started_again_behind_its_address_is_brought_to_the_weights(world):
    async with world(synced=True) as w:
        w.pool.sync = Sync(version=1)
        a, one = await w.join("a")
        await until(lambda: one.state == "serving", "it")
        a.version = 0
        await until(lambda: a.version == 1, "its update")
        assert one.reason == "holds weight version 0, but was given 1: was it restarted?"
        await until(lambda: one.state == "serving", "its return")


async def test_a_load_that_was_read_before_an_update_says_nothing_of_the_version_after_it(world):
    class Late(Scripted):
        held = asyncio.Event()

        async def load(self, request):
            answer = await super().load(request)
            if self.version == 1:
                self.held.set()
                await until(lambda: self.version == 2, "the update")
            return answer

    async with world(synced=True, heartbeat_s=6) as w:
        w.pool.sync = Sync(version=1)
        a, one = await w.join("a", Late())
        await until(lambda: one.state == "serving" and a.held.is_set(), "a load that is read and not answered")
        before = one.load
        one.record_version(2)
        a.version = w.pool.sync.version = 2
        await until(lambda: one.load is not before, "the late answer")
        assert (one.load.weight_version, one.version, one.state, one.reason) == (1, 2, "serving", "")


async def test_an_instance_that_stays_paused_is_brought_to_the_weights(world):
    async with world(synced=True) as w:
        w.pool.sync = Sync(version=1)
        a, one = await w.join("a")
        await until(lambda: one.state == "serving", "it")
        a.status = 409
        running = asyncio.create_task(w.run(PROMPTS[:1]))
        await until(lambda: len(w.pool.sync.caught_up) > 1, "its update")
        assert "refused every request as paused" in one.reason
        a.status = 200
        await running
        w.check_complete(PROMPTS[:1])


async def test_an_instance_that_hangs_while_it_catches_up_is_silent(world):
    class Hangs(Sync):
        async def catch_up(self, instance):
            await asyncio.sleep(0.2)
            await instance.client.call(GetHealth())

    async with world(synced=True) as w:
        w.pool.sync = Hangs(version=1)
        a, one = await w.join("a")
        await until(lambda: one.state == "updating", "the attempt")
        a.silent = True
        await until(lambda: one.state == "silent", "its silence")
        assert "no answer for" in one.reason


async def test_with_no_instance_the_pool_waits_for_one(world):
    async with world() as w:
        running = asyncio.create_task(w.run())
        await asyncio.sleep(0.3)
        await w.join("late")
        await running
        w.check_complete()


async def test_with_no_instance_for_too_long_it_fails_by_name(world):
    async with world(wait_s=0.6) as w:
        a, one = await w.join("a")
        await until(lambda: one.met, "its answer")
        a.silent = True
        began = time.monotonic()
        with pytest.raises(ProcessDied, match=r"no rollout instance is left: waited 0\.6 s.*; a did not answer"):
            await w.run()
        assert time.monotonic() - began < 10
        with pytest.raises(ProcessDied):
            await w.pool.wait_for_member()


async def test_figures_and_periods(world, tmp_path):
    async with world() as w:
        _, one = await w.join("a")
        await w.run()
        await until(lambda: one.status()["tokens_per_s"] > 0, "figures")
        status = one.status()
        assert (status["name"], status["state"], status["breaker"], status["restarts"]) == ("a", "serving", "closed", 0)
        w.pool.leave(one)
    w.trace.flush()
    assert [s["name"] for s in read_spans(tmp_path / "trace") if s["lane"] == "pool a"] == [
        "starting",
        "serving",
        "draining",
    ]


async def test_an_address_that_never_answers_but_joins_again_and_again_holds_up_no_failure(world):
    async with world(synced=True, wait_s=0.2, timeout_s=1.0) as w:
        w.pool.sync = Sync(version=3)

        async def joins():
            while True:
                if w.pool.find_instance("far") is None:
                    w.pool.enter("far", "http://127.0.0.1:9")
                await asyncio.sleep(0.02)

        joining = asyncio.create_task(joins())
        try:
            with pytest.raises(ProcessDied, match=r"no rollout instance has joined: waited 1 s.*; far "):
                await asyncio.wait_for(w.pool.wait_for_member(), 15)
        finally:
            joining.cancel()


async def test_the_wait_for_the_first_begins_when_the_trainer_is_ready_and_is_as_long_as_a_start(world):
    told = []
    async with world(synced=True, wait_s=0.2, timeout_s=1.0) as w:
        ready = asyncio.Event()
        w.pool.needed = ready.is_set
        w.pool.how_to_join = "metronome serve RECIPE --join RUN"
        w.pool._notices = RunEvents(lambda stage, text: told.append(text))
        waiting = asyncio.create_task(w.pool.wait_for_member())
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


async def test_no_wait_is_told_for_an_instance_that_was_not_asked_yet(world):
    told = []
    async with world(synced=True) as w:
        w.pool._notices = RunEvents(lambda stage, text: told.append(text))
        w.pool.connected.clear()
        _, one = await w.join("a")
        one.met = False
        w.pool.connected.set()
        await until(lambda: one.met, "its answer")
        await asyncio.sleep(0.3)
    assert not [line for line in told if "waits" in line]


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
            await asyncio.wait_for(w.pool.wait_for_member(), 5)


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
