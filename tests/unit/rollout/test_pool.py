"""Pool, keeper and producer over real sockets; instances are scripted, the weight sync too."""

import asyncio
import contextlib
import itertools
import time
from collections import Counter

import pytest
from scripted import Scores, Scripted, Sync, tokens_of, until

from engine.config import Config
from engine.data.loader import sampling_seed
from engine.errors import MetronomeError, ProcessDied
from engine.rollout import keeper, producer
from engine.rollout.client import Refused, Sampling
from engine.rollout.pool import Pool
from engine.rollout.producer import Producer
from engine.rollout.selection import Selection
from engine.trace import Trace, read_spans
from engine.types import Prompt, Score

ROLLOUT = {"group_size": 4, "concurrency": 2, "heartbeat_s": 0.3, "wait_s": 30, "timeout_s": 10}
PROMPTS = [Prompt(f"p{n}", f"{n}+1=", str(n + 1), (1, 2, n + 3)) for n in range(8)]


PARTIAL = Sampling(16, 1.0, 1.0, 0, partial=True)


class World:
    """A pool, and instances that join it."""

    def __init__(self, folder, stack, synced, **rollout):
        config = Config(rollout=ROLLOUT | rollout)
        self.trace = Trace(folder / "trace", "launcher")
        self.pool = Pool(config, folder, folder, self.trace, synced)
        self.producer = Producer(self.pool, Scores(), str, Sampling(16, 1.0, 1.0, 0), 4, 0, self.trace)
        self.stack = stack
        self.groups, self.landed = [], []

    async def join(self, name, scripted=None):
        scripted = scripted or Scripted()
        url = await self.stack.enter_async_context(scripted.serving())
        return scripted, self.pool.enter(name, url)

    async def run(self, prompts=PROMPTS, within_s=10.0):
        async def put(group):
            self.groups.append(group)

        async def land(landed):
            self.landed.append((landed.group, landed.number))

        async with asyncio.timeout(within_s):
            await self.producer.run(3, [(0, prompt) for prompt in prompts], put, land)

    def check_complete(self, prompts=PROMPTS):
        """Every response exactly once, each what its prompt and seed make it."""
        assert sorted(group.index for group in self.groups) == list(range(len(prompts)))
        for group in self.groups:
            seeds = [sampling_seed(0, 0, group.prompt.id, number) for number in range(4)]
            expected = [tokens_of(list(group.prompt.token_ids), seed) for seed in seeds]
            assert [list(response.token_ids) for response in group.responses] == expected
            assert [score.value for score in group.scores] == [float(len(tokens)) for tokens in expected]
        assert Counter(self.landed) == Counter({(g, n): 1 for g in range(len(prompts)) for n in range(4)})


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Opens a world; closes it at the end of its block."""
    monkeypatch.setattr(keeper, "LOOK_S", 0.02)
    monkeypatch.setattr(keeper, "BACKOFF_S", 0.01)
    monkeypatch.setattr(producer, "BUSY_S", 0.02)

    @contextlib.asynccontextmanager
    async def begin(synced=False, **rollout):
        async with contextlib.AsyncExitStack() as stack:
            made = World(tmp_path, stack, synced, **rollout)
            await made.pool.connect()
            try:
                yield made
            finally:
                await made.pool.close()

    return begin


async def test_every_response_comes_exactly_once_within_the_limits(world):
    async with world() as w:
        a, one = await w.join("a")
        b, _ = await w.join("b")
        a.delay_s = b.delay_s = 0.01
        await w.run()
        w.check_complete()
        assert max(a.most, b.most) <= 2 * 4
        assert min(len(a.seeds), len(b.seeds)) >= 8
        assert one.groups == 0


async def test_groups_that_are_scored_as_a_whole(world):
    async with world() as w:
        w.producer = Producer(w.pool, Scores(per_response=False), str, Sampling(16, 1.0, 1.0, 0), 4, 0, w.trace)
        bad, _ = await w.join("a")
        await w.join("b")
        bad.status = 500
        await w.run()
        w.check_complete()


async def test_a_slow_instance_gets_less(world):
    async with world() as w:
        slow, _ = await w.join("a")
        fast, _ = await w.join("b")
        slow.delay_s, fast.delay_s = 0.3, 0.02
        await w.run([*PROMPTS, *[Prompt(f"q{n}", "", "", (4, n)) for n in range(16)]])
        assert len(slow.seeds) < len(fast.seeds) / 2


async def test_a_silent_instance_loses_what_it_holds_and_comes_back_through_catch_up(world):
    async with world(synced=True) as w:
        w.pool.sync = Sync(version=3)
        a, one = await w.join("a")
        b, _ = await w.join("b")
        await until(lambda: w.pool.size == 2, "both")
        a.delay_s, b.delay_s = 30, 0.01
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


async def test_faults_are_sent_again_elsewhere_and_open_the_breaker(world):
    async with world() as w:
        bad, one = await w.join("a")
        await w.join("b")
        bad.status = 500
        await w.run()
        w.check_complete()
        assert one.breaker.state == "open"
        assert len(bad.seeds) <= 8  # two groups; then no more
        assert one.state == "serving"


async def test_a_lone_instance_gets_its_trial_and_then_the_rest(world):
    async with world() as w:
        only, one = await w.join("a")
        only.status = 503
        running = asyncio.create_task(w.run(PROMPTS[:2]))
        await until(lambda: one.breaker.state == "open", "the breaker")
        await until(lambda: only.running == 0, "what was under way")
        sent = len(only.seeds)
        only.status, only.delay_s = 200, 0.05
        await until(lambda: only.running > 0, "the trial")
        assert (only.running, len(only.seeds)) == (1, sent + 1)
        await running
        w.check_complete(PROMPTS[:2])
        assert one.breaker.state == "closed"


async def test_dropped_connections_are_sent_again(world):
    async with world() as w:
        bad, _ = await w.join("a")
        await w.join("b")
        bad.drop = True
        await w.run()
        w.check_complete()


async def test_a_response_that_fails_everywhere_ends_the_run_by_name(world, monkeypatch):
    monkeypatch.setattr("engine.rollout.breaker.FIRST_S", 0.01)
    monkeypatch.setattr("engine.rollout.breaker.LONGEST_S", 0.01)
    async with world() as w:
        (await w.join("a"))[0].status = 500
        with pytest.raises(MetronomeError, match=r"step 3, generating: response \d to prompt p0 failed 10 times, .*a: POST "
                                                 r"/v1/completions answered 500"):
            await w.run(PROMPTS[:1])


async def test_a_refused_request_ends_the_run_at_once_by_name(world):
    async with world() as w:
        bad, _ = await w.join("a")
        bad.status = 400
        with pytest.raises(Refused, match=r"step 3, generating: response \d to prompt p\d: a: POST .* answered 400"):
            await w.run()
        assert len(bad.seeds) <= 16  # not all 32


async def test_a_paused_instance_is_asked_again(world):
    async with world() as w:
        paused, one = await w.join("a")
        paused.status = 409
        running = asyncio.create_task(w.run(PROMPTS[:1]))
        await until(lambda: len(paused.seeds) >= 12, "asking again")
        paused.status = 200
        await running
        w.check_complete(PROMPTS[:1])
        assert one.breaker.state == "closed"


async def test_leaving_finishes_what_it_holds_and_gets_nothing_new(world):
    async with world() as w:
        a, one = await w.join("a")
        b, _ = await w.join("b")
        a.delay_s = b.delay_s = 0.1
        running = asyncio.create_task(w.run())
        await until(lambda: a.running == 8, "work")
        w.pool.leave(one)
        assert one.state == "draining"
        assert one not in w.pool.members()
        await running
        w.check_complete()
        assert len(a.seeds) == 8  # all finished, none sent again
        assert one.state == "gone"
        assert w.pool.find("a") is None


async def test_a_late_instance_waits_for_the_first_publish(world):
    async with world(synced=True) as w:
        w.pool.sync = Sync(version=None)
        _, one = await w.join("a")
        await asyncio.sleep(0.4)
        assert (one.state, w.pool.members(), w.pool.size) == ("starting", [one], 0)
        one.version = 0
        w.pool.admit(one)
        w.pool.sync.version = 0
        await asyncio.sleep(0.2)
        assert (w.pool.size, w.pool.sync.caught_up) == (1, [])


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
        assert two.reason == "given up after 3 attempts to bring it to the weights: a checksum differs"


async def test_an_excluded_instance_forgets_its_version(world):
    """Half of the next version may be in it already."""
    async with world(synced=True) as w:
        w.pool.sync = Sync(version=1)
        _, one = await w.join("a")
        await until(lambda: one.state == "serving", "it")
        w.pool.exclude(one, "its transfer broke")
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
        assert one.reason == "holds weight version 0, it was brought to 1: started again?"
        await until(lambda: one.state == "serving", "its return")


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
            await instance.client.call("GET", "/health")

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
        a, _ = await w.join("a")
        a.silent = True
        began = time.monotonic()
        with pytest.raises(ProcessDied, match=r"no rollout instance is left: waited 0\.6 s.*; a did not answer"):
            await w.run()
        assert time.monotonic() - began < 3
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
    assert [s["name"] for s in read_spans(tmp_path / "trace") if s["lane"] == "pool a"] == ["starting", "serving", "draining"]


async def test_a_response_that_was_cut_goes_on_on_any_instance_and_is_whole(world):
    """rollout.partial: the tokens so far go along, the group is first in line, and nothing is sampled or verified twice."""
    async with world() as w:
        w.producer = Producer(w.pool, Scores(), str, PARTIAL, 4, 0, w.trace)
        a, _ = await w.join("a", Scripted(version=1))
        b, _ = await w.join("b", Scripted(version=2))
        a.cuts, b.cuts = 9, 5
        await w.run()
        w.check_complete()
        responses = [response for group in w.groups for response in group.responses]
        assert {start for response in responses for start, _ in response.versions} == {0, 1}  # cut after one token
        assert all(len(response.logprobs) == len(response.token_ids) for response in responses)
        assert a.cuts + b.cuts == 0


async def test_dynamic_sampling_begins_prompts_in_order_and_calls_off_what_nobody_needs(world):
    class Odd(Scores):
        async def score(self, prompt, responses):
            """Problems 0, 2, 4 … have equal scores."""
            return [Score(float(prompt.id[1:]) % 2 * response.seed) for response in responses]

    async with world() as w:
        w.producer = Producer(w.pool, Odd(), str, Sampling(16, 1.0, 1.0, 0), 4, 0, w.trace)
        (a, _), (b, _) = await w.join("a"), await w.join("b")
        a.delay_s, b.delay_s = 0.03, 0.01
        selection = Selection(3, 30)

        async def put(group):
            w.groups.extend(selection.decide(group))

        endless = ((0, Prompt(f"p{n}", "", "", (1, 2, n + 3))) for n in itertools.count())
        async with asyncio.timeout(10):
            await w.producer.until(3, endless, put, selection)
        assert [(group.index, group.prompt.id) for group in w.groups] == [(0, "p1"), (1, "p3"), (2, "p5")]
        assert selection.used == 6
        assert next(endless)[1].id in {"p6", "p7", "p8", "p9"}  # as many more as two instances hold
        await until(lambda: a.running + b.running == 0, "what was called off")
        assert all(one.groups == 0 for one in w.pool.instances)


async def test_a_group_that_is_being_put_when_the_selection_is_complete_is_put(world):
    """A put may take its time (statistics over the batch); what else arrives meanwhile must not call it off."""
    async with world() as w:
        await w.join("a")
        selection, arrived = Selection(1, 30), []

        async def put(group):
            arrived.append(group.index)
            due = selection.decide(group)
            await until(lambda: len(arrived) > 1, "another group beside it")
            await asyncio.sleep(0.05)
            w.groups.extend(due)

        endless = ((0, Prompt(f"p{n}", "", "", (1, 2, n + 3))) for n in itertools.count())
        async with asyncio.timeout(10):
            await w.producer.until(3, endless, put, selection)
        assert len(w.groups) == 1


async def test_in_mode_bounded_old_weights_finish_old_steps_and_only_new_ones_begin_what_they_would_be_too_old_for(world):
    """While instances swap one after the other: batch 3 at staleness 2 wants version 1."""
    async with world(synced=True) as w:
        w.pool.config = Config(rollout=ROLLOUT, train={"mode": "bounded", "max_staleness": 2})
        (a, old), (b, new) = await w.join("a", Scripted(version=0)), await w.join("b", Scripted(version=1))
        for one, version in ((old, 0), (new, 1)):
            one.version = version
        w.pool.admit(old)

        async def put(group):
            w.groups.append(group)

        async with asyncio.timeout(10):
            await w.producer.run(2, [(0, prompt) for prompt in PROMPTS[:3]], put)
            assert len(a.seeds) == 12
            later = asyncio.create_task(w.producer.run(3, [(0, prompt) for prompt in PROMPTS], put))
            await asyncio.sleep(0.1)
            assert len(a.seeds) == 12  # its room is free, but not for these
            w.pool.admit(new)
            await later
        assert (len(a.seeds), len(b.seeds)) == (12, 32)
        async with asyncio.timeout(10):
            await w.producer.run(2, [(0, prompt) for prompt in PROMPTS], put)
        versions = {response.versions[0][1] for group in w.groups[-8:] for response in group.responses}
        assert versions == {0, 1}  # one batch, from two versions
