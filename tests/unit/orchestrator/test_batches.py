"""How a step begins and where its prompts begin under dynamic sampling; what counts once, and what is refused without
effect. Requests go to a plane; groups are made by hand, at once."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest
import torch

from engine.algorithm.advantages import ADVANTAGES
from engine.client.service import _prompt_data
from engine.config import Config
from engine.data.loader import PromptLoader
from engine.data.prompts import prompt_id
from engine.errors import BadInput, ServiceConflict, ServiceFull
from engine.orchestrator.batches import SAMPLED_AT_ONCE, RolloutProfile
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.pool.instance_client import InstanceClient
from engine.orchestrator.stages import stages_of
from engine.orchestrator.steps import Steps
from engine.trainer.group_advantages import GroupAdvantages
from engine.types import Prompt, Score
from engine.wire import messages
from engine.wire.columns import open_group, open_prompt, pack_group, pack_ids
from engine.wire.messages import PromptData, PutPrompts, Ready, SampleResponses
from support.groups import group, numbered_group
from support.planes import plane_of, publish
from support.runs import config_of
from support.scripted import Scripted

PROMPTS = [Prompt(f"p{n}", str(n), "", (1, n)) for n in range(10)]


class Producer:
    """Samples nothing until it may, and tries prompts `at_once`, of which the last ends first; every third one has
    unequal scores."""

    def __init__(self, unequal=lambda prompt: int(prompt.problem) % 3 == 0, at_once=1):
        self.unequal = unequal
        self.at_once = at_once
        self.may = asyncio.Event()
        self.given = []
        self.tried = []

    async def sample(self, step, prompt, seeds):
        await self.may.wait()
        return []

    async def run(self, step, prompts, put, sampled=None):
        self.given += prompts
        await self.may.wait()

    async def run_until(self, step, prompts, put, selection):
        number = 0
        while not selection.complete:
            begun = [next(prompts) for _ in range(self.at_once)]
            self.tried += [(step, epoch, prompt.id) for epoch, prompt in begun]
            for later, (_, prompt) in reversed(list(enumerate(begun))):
                made = numbered_group(number + later, step)
                scores = (Score(1.0), Score(0.0 if self.unequal(prompt) else 1.0))
                await put(pack_group(replace(made, prompt=prompt, responses=made.responses * 2, scores=scores)))
                await asyncio.sleep(0)
            number += self.at_once


@pytest.fixture
def made(settings, tmp_path):
    """Makes a plane after a weight version, for a program's trainer."""

    async def make(version=0, producer=None, **keys):
        config = config_of(settings | {"rollout.concurrency": 1} | {key.replace("__", "."): keys[key] for key in keys})
        loader = PromptLoader(PROMPTS, 0, config.train.prompts_per_step)
        plane = plane_of(config, tmp_path, producer or Producer(), loader, trains=False)
        if version is not None:
            await publish(plane, version)
        return plane

    return make


SELECTED = {
    "algorithm__dynamic_sampling": True,
    "train__prompts_per_step": 2,
    "train__mode": "bounded",
    "train__max_staleness": 3,
}


def leased(steps, step):
    held = steps.lease_window("train", step, 0, 1000)
    return steps.given_rows(held) if held is not None else ()


async def generate(plane, numbers):
    """All at once, as in the modes that keep batches in flight."""
    for number in numbers:
        await plane.answer(PutPrompts(step=number))
    async with asyncio.timeout(5):
        await asyncio.gather(*(step.task for step in plane.steps.values()))
    return plane.steps.values()


async def test_each_batch_begins_where_the_one_before_it_ended_over_epochs_and_over_a_resume(made):
    plane = await made(**SELECTED)
    steps = await generate(plane, range(4))
    loader = PromptLoader(PROMPTS, 0, 2)
    stream = [loader.at(position) for position in range(steps[-1].next_position)]
    tried = plane.service.producer.tried
    assert [(epoch, identity) for _, epoch, identity in tried] == [(epoch, prompt.id) for epoch, prompt in stream]
    assert steps[-1].next_position > len(PROMPTS)
    kept = sum(int(prompt.problem) % 3 == 0 for _, prompt in stream)
    assert sum(step.reward_tried * step.prompts_used for step in steps) == pytest.approx(len(stream) - kept / 2)
    assert sum(step.prompts_used for step in steps) == steps[-1].next_position
    kept = [open_prompt(row).id for step in steps for row in leased(plane.steps, step.number)]
    assert kept == [prompt.id for _, prompt in stream if int(prompt.problem) % 3 == 0]

    resumed = await made(version=None, **SELECTED)
    await resumed.answer(Ready(start=2, prompt_position=steps[1].next_position, prompts=None))
    await publish(resumed, 2)
    later = await generate(resumed, range(2, 4))
    assert resumed.service.producer.tried == [one for one in tried if one[0] >= 2]
    assert [step.next_position for step in later] == [step.next_position for step in steps[2:]]


async def test_the_reward_of_all_that_were_tried_is_over_the_prompts_of_the_batch(made):
    """Not over those that another batch tries again, which were done sooner."""
    plane = await made(producer=Producer(at_once=10), **SELECTED)
    (step,) = await generate(plane, range(1))
    assert step.prompts_used < 10
    assert step.reward_tried == pytest.approx((step.prompts_used - 2 + 2 * 0.5) / step.prompts_used)
    assert step.reward_tried != pytest.approx((6 + 4 * 0.5) / 10)


async def test_a_batch_that_finds_too_few_fails_and_the_next_one_does_not_begin(made):
    plane = await made(producer=Producer(lambda prompt: False), **SELECTED)
    await generate(plane, range(2))
    assert "step 0: only 0 of 20 prompts have" in str(plane.failure)
    assert {step for step, *_ in plane.service.producer.tried} == {0}


async def test_a_checkpoint_without_a_position_is_refused(made):
    with pytest.raises(BadInput, match="the checkpoint before step 3 does not say how many prompts were used"):
        await (await made(version=None, **SELECTED)).answer(Ready(start=3, prompt_position=None, prompts=None))


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "bounded"])
def test_a_batch_of_batch_scope_is_leased_when_its_last_group_is_there_with_the_scores_of_all(mode):
    config = Config(
        algorithm={"advantage": "reinforce_plus_plus"},
        train={"mode": mode, "prompts_per_step": 2},
        rollout={"group_size": 2},
    )
    steps = Steps(stages_of(config, None))
    steps.begin(1, 2)
    made = [pack_group(replace(group(1, 0, rewards=(float(n), 0.0), statuses=("ok",) * 2), index=n)) for n in (1, 0)]
    steps.add_row(made[0])
    assert leased(steps, 1) == ()
    steps.add_row(made[1])
    batch = steps.batch_scores(1, {})
    groups = {row.index: open_group(row, batch) for row in leased(steps, 1)}
    assert [list(row) for row in batch.values] == [[0.0, 0.0], [1.0, 0.0]]
    advantages = torch.stack(
        [
            GroupAdvantages(config.algorithm, config.rollout.max_new_tokens).advantages(groups[index])
            for index in range(2)
        ]
    )
    whole = ADVANTAGES["reinforce_plus_plus"](torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.full((2, 2), 2.0))
    assert torch.equal(advantages, whole)


SAMPLE = SampleResponses(prompt=pack_ids([5, 6]), seeds=(1,))
OWN = PutPrompts(step=0, prompts=(PromptData("1+1=", "2", pack_ids([5])),))


def own(problem="1+1=", ids=(5,), columns=b"{}", answer="2"):
    return PutPrompts(step=0, prompts=(PromptData(problem, answer, pack_ids(ids), columns=columns),))


REFUSED = [
    *((None, request, ServiceConflict, "no weight version has been published yet") for request in (SAMPLE, OWN)),
    *(
        (0, SampleResponses(prompt=prompt, seeds=(1,)), BadInput, "prompt|multiple of 4")
        for prompt in (b"", b"123", *map(pack_ids, ([-1], [10**6], [1] * 64)))
    ),
    *(
        (0, SampleResponses(prompt=pack_ids([5]), seeds=seeds), BadInput, "seeds: expected 1 to 4")
        for seeds in ((), (-1,), (2**63,), (0,) * 5)
    ),
    *(
        (0, own(columns=columns), BadInput, "columns")
        for columns in (b"", b"[]", b"7", b"{", b'{"a": NaN}', b'{"a": \xff}x', msgspec.msgpack.encode({"a": b"\x00"}))
    ),
    (0, own(answer="x" * 2**20), ServiceFull, "more would exceed 1,048,576"),
    *(
        (None, request, ServiceConflict, "weight version")
        for request in (
            messages.VerifySync(expected=()),
            messages.FinishSync(version=0),
            messages.AbortSync(version=0, reason=""),
            messages.ConnectSync(version=0, transport="gloo", stages=()),
            messages.OpenSync(version=-1),
            messages.MayPublish(version=-1),
        )
    ),
]
"""The version that was published, a request, and how it is refused."""


@pytest.mark.parametrize(("version", "request_", "error", "said"), REFUSED)
async def test_what_is_malformed_too_large_or_out_of_turn_is_refused_without_effect(
    made, monkeypatch, version, request_, error, said
):
    monkeypatch.setattr("engine.orchestrator.batches.MOST_BYTES", 2**20)
    plane = await made(version, train__prompts_per_step=1)
    with pytest.raises(error, match=said):
        await plane.answer(request_)
    assert (plane.steps.numbers, plane.status()["held_bytes"], plane.status()["version"]) == ([], 0, version)


async def test_prompts_of_all_steps_that_are_not_over_count_together(made, monkeypatch):
    plane = await made(train__prompts_per_step=1, train__mode="bounded", train__max_staleness=3)
    await plane.answer(own())
    one = plane.status()["held_bytes"]
    monkeypatch.setattr("engine.orchestrator.batches.MOST_BYTES", int(2.5 * one))
    await plane.answer(msgspec.structs.replace(own(), step=1))
    assert plane.status()["held_bytes"] == 2 * one
    with pytest.raises(ServiceFull, match=f"holds {2 * one:,} bytes"):
        await plane.answer(msgspec.structs.replace(own(), step=2))
    await plane.close()


async def test_groups_that_are_sampled_for_programs_have_a_limit(made):
    plane = await made()
    waiting = [asyncio.create_task(plane.answer(SAMPLE)) for _ in range(SAMPLED_AT_ONCE)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceFull, match=f"{SAMPLED_AT_ONCE} groups are being sampled"):
        await plane.answer(SAMPLE)
    plane.service.producer.may.set()
    await asyncio.gather(*waiting)
    await plane.answer(SAMPLE)


async def test_a_step_is_started_once_whatever_is_sent_again(made):
    plane = await made()
    assert [(await plane.answer(PutPrompts(step=0))).new for _ in range(2)] == [True, False]
    with pytest.raises(ServiceConflict, match="step 0 already has other prompts"):
        await plane.answer(OWN)
    with pytest.raises(ServiceConflict, match="step 7: with weight version 0 mode 'periodic' takes step 0"):
        await plane.answer(PutPrompts(step=7))
    assert plane.steps.numbers == [0]
    await plane.close()


async def test_prompts_of_a_program_are_here_as_they_were_there_and_count_until_their_step_is_over(made):
    prompt = Prompt(
        id=prompt_id("1+1=", "2"), problem="1+1=", answer="2", token_ids=(5, 6), columns={"n": 1}, text="1+1=<think>"
    )
    plane = await made(train__prompts_per_step=1)
    own = PutPrompts(step=0, prompts=(_prompt_data(prompt),))
    assert [(await plane.answer(own)).new for _ in range(2)] == [True, False]
    await asyncio.sleep(0.01)
    ((_, found),) = plane.service.producer.given
    assert replace(found, columns=dict(found.columns)) == prompt
    assert plane.status()["held_bytes"] > 0
    plane.steps.end(0)
    assert plane.status()["held_bytes"] == 0
    with pytest.raises(ServiceConflict, match="step 0 is over"):
        await plane.answer(PutPrompts(step=0))


async def test_an_instance_that_can_not_profile_says_so_once_and_the_run_goes_on(capsys):
    """A scripted one has no route for it; one that joined from elsewhere is not asked."""
    async with Scripted().serving() as url, aiohttp.ClientSession() as session:
        clients = [InstanceClient(name, url, session, 10.0) for name in ("own", "joined")]
        instances = [Instance(clients[0], declared=object()), Instance(clients[1])]
        profile = RolloutProfile(SimpleNamespace(pool=SimpleNamespace(instances=instances)), [1, 2])
        for step in range(4):
            await profile.begin_step(step)
            await profile.end_step(step)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("train.profile: own is not profiled: own: POST /start_profile answered 404")
