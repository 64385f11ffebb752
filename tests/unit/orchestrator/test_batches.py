"""Where a step's prompts begin under dynamic sampling, and when a batch of batch scope is there. Groups are made by
hand, at once."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import aiohttp
import pytest
import torch

from engine.algorithm.advantages import ADVANTAGES
from engine.config import Config
from engine.data.loader import PromptLoader
from engine.errors import BadInput, MetronomeError
from engine.orchestrator.batches import BatchGenerator, RolloutProfile
from engine.orchestrator.column_store import MemoryStore
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.pool.instance_client import InstanceClient
from engine.orchestrator.stages import stages_of
from engine.orchestrator.table import RowTable
from engine.trainer.group_advantages import GroupAdvantages
from engine.types import Group, Prompt, Response, Score
from engine.wire.columns import open_group, open_prompt, pack_group
from support.groups import group
from support.scripted import Scripted

PROMPTS = [Prompt(f"p{n}", str(n), "", (1, n)) for n in range(10)]


class Producer:
    """Tries prompts one after the other; `unequal` says of which the scores differ."""

    def __init__(self, unequal):
        self.unequal = unequal
        self.tried = []

    async def run_until(self, step, prompts, put, selection):
        number = 0
        while not selection.complete:
            epoch, prompt = next(prompts)
            self.tried.append((step, epoch, prompt.id))
            response = Response(
                token_ids=(5,),
                logprobs=(-0.5,),
                versions=((0, 0),),
                loss_mask=(True,),
                finish_reason="stop",
                text="a",
                seed=0,
                instance="instance-0",
            )
            made = Group(
                step=step,
                index=number,
                prompt=prompt,
                responses=(response,) * 2,
                scores=(Score(1.0), Score(0.0 if self.unequal(prompt) else 1.0)),
            )
            await put(pack_group(made))
            await asyncio.sleep(0)
            number += 1


def generation(unequal=lambda prompt: int(prompt.problem) % 3 == 0):
    async def notify():
        pass

    config = Config(algorithm={"dynamic_sampling": True}, train={"prompts_per_step": 2})
    producer = Producer(unequal)
    table = RowTable(stages_of(config, None))
    loader = PromptLoader(PROMPTS, 0, 2)
    service = SimpleNamespace(producer=producer)
    made = BatchGenerator(
        config=config, loader=loader, service=service, table=table, store=MemoryStore(), notify=notify
    )
    return made, producer


def leased(table, step):
    held = table.lease_window("train", step, 0, 1000)
    return table.given_rows(held) if held is not None else ()


async def generate(made, steps):
    """All at once, as in the modes that keep batches in flight."""
    batches = []
    for step in steps:
        batch = made.begin_batch(step)
        batch.task = asyncio.create_task(made.fill_batch(batch))
        batches.append(batch)
    async with asyncio.timeout(5):
        await asyncio.gather(*(batch.task for batch in batches))
    return batches


async def test_each_batch_begins_where_the_one_before_it_ended_over_epochs_and_over_a_resume():
    made, producer = generation()
    made.resume_at(0, None)
    batches = await generate(made, range(4))
    loader = PromptLoader(PROMPTS, 0, 2)
    stream = [loader.at(position) for position in range(batches[-1].next_position)]
    assert [(epoch, identity) for _, epoch, identity in producer.tried] == [
        (epoch, prompt.id) for epoch, prompt in stream
    ]
    assert batches[-1].next_position > len(PROMPTS)
    kept = sum(int(prompt.problem) % 3 == 0 for _, prompt in stream)
    assert sum(batch.reward_tried * batch.prompts_used for batch in batches) == pytest.approx(len(stream) - kept / 2)
    assert sum(batch.prompts_used for batch in batches) == batches[-1].next_position
    kept = [open_prompt(row).id for batch in batches for row in leased(batch.table, batch.step)]
    assert kept == [prompt.id for _, prompt in stream if int(prompt.problem) % 3 == 0]

    resumed, again = generation()
    resumed.resume_at(2, batches[1].next_position)
    later = await generate(resumed, range(2, 4))
    assert again.tried == [one for one in producer.tried if one[0] >= 2]
    assert [batch.next_position for batch in later] == [batch.next_position for batch in batches[2:]]


async def test_a_batch_that_finds_too_few_fails_and_the_next_one_does_not_begin():
    made, producer = generation(unequal=lambda prompt: False)
    made.resume_at(0, None)
    with pytest.raises(MetronomeError, match="step 0: only 0 of 20 prompts have"):
        await generate(made, range(2))
    assert {step for step, *_ in producer.tried} == {0}


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "bounded"])
def test_a_batch_of_batch_scope_is_leased_when_its_last_group_is_there_with_the_scores_of_all(mode):
    config = Config(
        algorithm={"advantage": "reinforce_plus_plus"},
        train={"mode": mode, "prompts_per_step": 2},
        rollout={"group_size": 2},
    )
    table = RowTable(stages_of(config, None))
    table.begin_step(1, 2)
    made = [pack_group(replace(group(1, 0, rewards=(float(n), 0.0), statuses=("ok",) * 2), index=n)) for n in (1, 0)]
    table.add_row(made[0])
    assert leased(table, 1) == ()
    table.add_row(made[1])
    batch = table.batch_scores(1, {})
    groups = {row.index: open_group(row, batch) for row in leased(table, 1)}
    assert [list(row) for row in batch.values] == [[0.0, 0.0], [1.0, 0.0]]
    advantages = torch.stack([GroupAdvantages.of(config).advantages(groups[index]) for index in range(2)])
    whole = ADVANTAGES["reinforce_plus_plus"](torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.full((2, 2), 2.0))
    assert torch.equal(advantages, whole)


def test_a_checkpoint_without_a_position_is_refused():
    made, _ = generation()
    with pytest.raises(BadInput, match="the checkpoint before step 3 does not say how many prompts were used"):
        made.resume_at(3, None)


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
