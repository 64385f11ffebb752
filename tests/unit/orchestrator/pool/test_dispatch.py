"""Where groups go: pool and producer over real sockets; the instances are scripted. Random sequences of events are in
test_pool_states.py."""

import asyncio
import itertools

import pytest
from aiohttp import web

from engine.config import Config
from engine.data.loader import sampling_seed
from engine.errors import DeadlineError, MetronomeError
from engine.orchestrator.dynamic_sampling import DynamicSampling
from engine.orchestrator.pool.instance_client import InstanceFault, Refused
from engine.types import Prompt, Score
from engine.wire.columns import open_group
from support.pool_world import PROMPTS, ROLLOUT, worlds
from support.scripted import Scores, Scripted, until


@pytest.fixture
def world(tmp_path, monkeypatch):
    return worlds(tmp_path, monkeypatch)


def wrong_token(found):
    found["choices"][0]["token_ids"][0] = -1
    return found


@pytest.mark.parametrize(
    ("fault", "reason", "per_response"),
    [
        ({}, "", True),
        ({"status": 500}, "3 failures in a row: a: POST /v1/completions answered 500", True),
        ({"status": 500}, "3 failures in a row: a: POST /v1/completions answered 500", False),
        ({"drop": True}, "3 failures in a row: a: POST /v1/completions: ", True),
        ({"body": "<html>welcome</html>"}, "a: POST /v1/completions answered 200 with an invalid reply", True),
        ({"spoil": wrong_token}, "a: its reply to POST /v1/completions breaks the protocol: token 0 is -1", True),
    ],
)
async def test_whatever_an_instance_does_every_response_comes_once_from_its_prompt_and_seed(
    world, fault, reason, per_response
):
    """And nothing of one that breaks the protocol is used."""
    async with world() as w:
        scores = Scores(per_response)
        w.produce(scores)
        w.epoch = 3
        bad, one = await w.join("a")
        good, _ = await w.join("b")
        good.delay_s = 0.01
        vars(bad).update(fault)
        await w.run()
        w.check_complete()
        assert max(bad.most, good.most) <= 2 * 4
        assert set(scores.calls) == {1 if per_response else 4}
        assert one.reason.startswith(reason)
        assert (one.state == "out") == bool(fault)
        assert one.groups == 0
        if fault:
            assert len(bad.seeds) <= 16  # three groups, and the one beside; then no more
            assert {response.instance for group in w.groups for response in group.responses} == {"b"}


async def test_requests_that_take_too_long_are_failures(world):
    """The instance answers everything but requests for responses: its health says nothing."""
    async with world(timeout_s=0.2) as w:
        hanging, one = await w.join("a")
        hanging.delay_s = 60
        running = asyncio.create_task(w.run(PROMPTS[:1]))
        await until(lambda: "3 failures in a row: a: no answer to POST" in one.reason, "the third")
        running.cancel()


async def test_a_group_counts_once_a_good_response_resets_the_count_and_the_third_time_out_is_the_last(world):
    async with world() as w:
        _, one = await w.join("a")
        for times in (1, 1, 2, 3):  # the good response between the first two forgets the first
            if times == 1:
                one.record_success()
            async with w.pool.borrow() as late:
                for failures in range(3):
                    assert one.failures == failures
                    async with w.pool.borrow() as place:
                        for _ in range(4):
                            w.pool.record_failure(place, InstanceFault("500"))
                if times < 3:
                    w.pool.record_failure(late, InstanceFault("ended with it"))  # by the pool: no failure of its own
            assert (one.state, one.failures) == ("gone" if times == 3 else "out", 0 if times < 3 else one.failures)
            if times < 3:
                one.wait_for_weights()
                w.pool.admit_instance(one)
        assert one.reason == "given up after it was left out 3 times in a row: 3 failures in a row: 500"


async def test_a_response_that_fails_everywhere_ends_the_run_by_name(world):
    async with world(heartbeat_s=0.1) as w:
        for name in "ab":
            (await w.join(name))[0].status = 500
        with pytest.raises(
            MetronomeError,
            match=r"step 3, generating: response \d to prompt p0 failed 10 times; last error: [ab]: POST "
            r"/v1/completions answered 500",
        ):
            await w.run(PROMPTS[:1])


async def test_a_refused_request_ends_the_run_at_once_by_name(world):
    async with world() as w:
        bad, _ = await w.join("a")
        bad.status = 400
        with pytest.raises(Refused, match=r"step 3, generating: response \d to prompt p\d: a: POST .* answered 400"):
            await w.run()
        assert len(bad.seeds) <= 16  # not all 32


async def test_a_paused_instance_is_asked_again_until_the_group_has_met_nothing_else_for_too_long(world):
    """The wait for a place, here of two other groups, does not count."""
    refused = 8  # the first group, twice

    def takes(body):
        nonlocal refused
        if refused and body["prompt"] == [1, 2, 3]:
            refused -= 1
            raise web.HTTPConflict
        return 0.6

    async with world(timeout_s=1.0, concurrency=1) as w:
        paused, one = await w.join("a")
        paused.takes = takes
        await w.run(PROMPTS[:3])
        w.check_complete(PROMPTS[:3])
        assert (refused, one.failures) == (0, 0)
        refused = 10**6
        with pytest.raises(DeadlineError, match=r"response \d to prompt p0 found no instance that takes it in 1 s: "):
            await w.run(PROMPTS[:1])


async def test_a_slot_is_free_when_a_response_ends_and_a_group_is_sent_once_it_has_one_for_each_of_its_own(world):
    """Two groups of four fill it. Three of each group end soon, and the fourth much later."""
    async with world() as w:
        a, one = await w.join("a")
        slow = {sampling_seed(0, 0, prompt.id, 0) for prompt in PROMPTS[:2]}
        a.takes = lambda body: 60.0 if body["seed"] in slow else 0.01
        running = asyncio.create_task(w.run(PROMPTS[:5]))
        try:
            await until(lambda: len(w.groups) == 3, "the three groups that do not wait for the slow responses")
            assert sorted(group.index for group in w.groups) == [2, 3, 4]
            assert (one.groups, one.responses, a.running) == (2, 2, 2)
            assert a.most <= 8
            sent = [tuple(body["prompt"]) for body in a.asked]
            assert [sent.count(prompt.token_ids) for prompt in PROMPTS[:5]] == [4] * 5
            assert [len(set(sent[at : at + 4])) for at in range(0, 20, 4)] == [1] * 5  # each group at once
        finally:
            running.cancel()


async def test_one_that_stops_waiting_makes_way_for_those_who_need_fewer_slots(world):
    async with world() as w:
        _, one = await w.join("a")

        async def borrow(size):
            async with w.pool.borrow(size=size):
                await asyncio.Event().wait()

        async with w.pool.borrow(size=6):
            large, small = (asyncio.create_task(borrow(size)) for size in (4, 2))
            await asyncio.sleep(0)
            large.cancel()
            for _ in range(5):
                await asyncio.sleep(0)  # at once, and not by another event of the pool
            assert one.responses == 8
            small.cancel()


async def test_a_place_on_an_instance_that_is_excluded_as_it_is_given_is_not_used(world):
    """What is sent after the exclusion would be cut by nobody."""
    async with world(heartbeat_s=0.3) as w:
        _, one = await w.join("a")
        begun = [w.pool.borrow() for _ in range(2)]
        for group in begun:
            await group.__aenter__()
        entered = asyncio.Event()

        async def wait():
            async with w.pool.borrow() as place:
                assert place.instance.state == "serving"
                entered.set()

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        await begun[0].__aexit__(None, None, None)  # the place is given, and its task has not gone on yet
        w.pool.exclude_instance(one, "out")
        await asyncio.sleep(0)
        assert not entered.is_set()
        assert one.groups == 1
        await asyncio.wait_for(waiting, 5)  # it answers, and serves again
        await begun[1].__aexit__(None, None, None)
        assert one.groups == 0


async def test_a_response_that_was_cut_goes_on_on_any_instance_and_is_whole(world):
    """rollout.partial: the tokens so far go along, the group is first in line,
    and nothing is sampled or verified twice."""
    async with world() as w:
        w.produce(sampling={"partial": True})
        a, _ = await w.join("a", Scripted(version=1))
        b, _ = await w.join("b", Scripted(version=2))
        a.cuts = 9
        b.cuts = 5
        await w.run()
        w.check_complete()
        responses = [response for group in w.groups for response in group.responses]
        assert {start for response in responses for start, _ in response.versions} == {0, 1}  # cut after one token
        assert all(len(response.logprobs) == len(response.token_ids) for response in responses)
        assert a.cuts + b.cuts == 0


class ScoredBy(Scores):
    def __init__(self, score_of):
        super().__init__()
        self.score_of = score_of

    async def score(self, prompt, responses):
        return [Score(float(self.score_of(int(prompt.id[1:])) * response.seed)) for response in responses]


def endless():
    return ((0, Prompt(f"p{n}", "", "", (1, 2, n + 3))) for n in itertools.count())


async def test_dynamic_sampling_begins_prompts_in_order_and_calls_off_what_nobody_needs(world):
    async with world() as w:
        w.produce(ScoredBy(lambda number: number % 2))
        (a, _) = await w.join("a")
        (b, _) = await w.join("b")
        a.delay_s = 0.03
        b.delay_s = 0.01
        selection = DynamicSampling(3, 30)

        async def put(group):
            w.groups.extend(map(open_group, selection.add_group(group)))

        prompts = endless()
        async with asyncio.timeout(10):
            await w.producer.run_until(3, prompts, put, selection)
        assert [(group.index, group.prompt.id) for group in w.groups] == [(0, "p1"), (1, "p3"), (2, "p5")]
        assert selection.used == 6
        assert next(prompts)[1].id in {"p6", "p7", "p8", "p9"}  # as many more as two instances hold
        await until(lambda: a.running + b.running == 0, "what was called off")
        assert all(one.groups == 0 for one in w.pool.instances)


async def test_dynamic_sampling_tries_a_prompt_when_responses_end_and_not_only_when_their_group_does(world):
    """Two groups of four fill the instance. A response of each of the first two takes for ever; groups of equal scores
    make more prompts necessary, and the one that is kept is the last."""
    async with world() as w:
        w.produce(ScoredBy(lambda number: number == 5))
        a, one = await w.join("a")
        slow = {sampling_seed(0, 0, f"p{n}", 0) for n in (0, 1)}
        a.takes = lambda body: 60.0 if body["seed"] in slow else 0.01
        selection = DynamicSampling(1, 30)
        arrived = []

        async def put(group):
            arrived.append(group.index)
            w.groups.extend(map(open_group, selection.add_group(group)))

        running = asyncio.create_task(w.producer.run_until(3, endless(), put, selection))
        try:
            await until(lambda: 5 in arrived, "the prompt that is kept, while two responses still run")
            assert set(arrived).isdisjoint({0, 1})
            assert one.responses <= a.most <= 8
            assert not selection.complete  # the first two prompts may be kept before it
        finally:
            running.cancel()


async def test_a_group_that_is_being_put_when_the_selection_is_complete_is_put(world):
    """A put may take its time (statistics over the batch); what else arrives meanwhile must not call it off."""
    async with world() as w:
        await w.join("a")
        selection = DynamicSampling(1, 30)
        arrived = []

        async def put(group):
            arrived.append(group.index)
            due = selection.add_group(group)
            await until(lambda: len(arrived) > 1, "another group beside it")
            await asyncio.sleep(0.05)
            w.groups.extend(due)

        async with asyncio.timeout(10):
            await w.producer.run_until(3, endless(), put, selection)
        assert len(w.groups) == 1


async def test_in_mode_bounded_old_weights_finish_old_steps_and_only_new_ones_begin_what_they_would_be_too_old_for(
    world,
):
    """While instances swap one after the other: batch 3 at staleness 2 wants version 1."""
    async with world(synced=True) as w:
        w.pool.config = Config(rollout=ROLLOUT, train={"mode": "bounded", "max_staleness": 2})
        (a, old) = await w.join("a", Scripted(version=0))
        (b, new) = await w.join("b", Scripted(version=1))
        for one, version in ((old, 0), (new, 1)):
            one.record_version(version)
        w.pool.admit_instance(old)

        async def put(group):
            w.groups.append(open_group(group))

        async with asyncio.timeout(10):
            await w.producer.run(2, [(0, prompt) for prompt in PROMPTS[:3]], put)
            assert len(a.seeds) == 12
            later = asyncio.create_task(w.producer.run(3, [(0, prompt) for prompt in PROMPTS], put))
            await asyncio.sleep(0.1)
            assert len(a.seeds) == 12  # its room is free, but not for these
            w.pool.admit_instance(new)
            await later
        assert (len(a.seeds), len(b.seeds)) == (12, 32)
        async with asyncio.timeout(10):
            await w.producer.run(2, [(0, prompt) for prompt in PROMPTS], put)
        versions = {response.versions[0][1] for group in w.groups[-8:] for response in group.responses}
        assert versions == {0, 1}  # one batch, from two versions
