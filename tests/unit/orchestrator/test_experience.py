"""What programs put: in which order, what counts once, and what is refused without effect. No instances."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from engine.client.service import _prompt_data
from engine.data.loader import PromptLoader
from engine.data.prompts import prompt_id
from engine.errors import BadInput, ServiceConflict, ServiceFull
from engine.orchestrator.batches import BatchGenerator
from engine.orchestrator.batches_in_flight import BatchesInFlight
from engine.orchestrator.column_store import MemoryStore
from engine.orchestrator.experience import SAMPLED_AT_ONCE, Experience
from engine.orchestrator.run_state import RunState
from engine.orchestrator.stages import stages_of
from engine.orchestrator.table import RowTable
from engine.orchestrator.weight_sync.publish_requests import PublishRequests
from engine.run.trace import Trace
from engine.types import Prompt
from engine.wire import messages
from engine.wire.columns import pack_ids
from engine.wire.messages import PromptData, PutPrompts, SampleResponses
from support.runs import config_of


class Producer:
    """Samples nothing until it may."""

    def __init__(self):
        self.may = asyncio.Event()

    async def sample(self, step, prompt, seeds):
        await self.may.wait()
        return []


@pytest.fixture
def made(settings, tmp_path):
    """Makes an `Experience` after weight version 0; `.started` counts the steps that have begun."""

    def make(version=0, **keys):
        config = config_of(settings | {"rollout.concurrency": 1} | {key.replace("__", "."): keys[key] for key in keys})
        pool = SimpleNamespace(size=1, serving=1, failure=None, members=list, check_arrivals=lambda check: None)
        service = SimpleNamespace(pool=pool, producer=Producer())
        loader = PromptLoader([Prompt("p", "1+1=", "2", (5, 6))], 0, config.train.prompts_per_step)
        state = RunState()
        table = RowTable(stages_of(config, 60.0))
        batches = BatchesInFlight(state)
        publishing = PublishRequests(
            config=config,
            service=service,
            trace=Trace(tmp_path, "orchestrator"),
            run_state=state,
            batches=batches,
            allows_publish=lambda serves: True,
            served=lambda one: None,
            begins_again=lambda: None,
        )
        publishing.version = version
        started = []
        made = Experience(
            config=config,
            service=service,
            run_state=state,
            generator=BatchGenerator(
                config=config,
                loader=loader,
                service=service,
                table=table,
                store=MemoryStore(),
                notify=state.notify,
            ),
            batches=batches,
            publishing=publishing,
            generate=lambda batch, prompts: asyncio.sleep(0),
            started=lambda: started.append(table.steps[-1]),
            weights=tmp_path,
        )
        made.started = started
        made.table = table
        made.publishing = publishing
        made.producer = service.producer
        return made

    return make


SAMPLE = SampleResponses(prompt=pack_ids([5, 6]), seeds=(1,))


async def test_nothing_is_sampled_or_started_before_the_first_version(made):
    one = made(version=None)
    for refused in (
        one.sample_responses(SAMPLE),
        one.put_prompts(PutPrompts(step=0)),
    ):
        with pytest.raises(ServiceConflict, match="no weight version has been published yet"):
            await refused
    assert one.started == []


async def test_groups_that_are_sampled_for_programs_have_a_limit(made):
    one = made()
    most = SAMPLED_AT_ONCE * 1
    waiting = [asyncio.create_task(one.sample_responses(SAMPLE)) for _ in range(most)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceFull, match=f"{most} groups are being sampled"):
        await one.sample_responses(SAMPLE)
    one.producer.may.set()
    await asyncio.gather(*waiting)
    await one.sample_responses(SAMPLE)


@pytest.mark.parametrize("prompt", [b"", b"123", pack_ids([-1]), pack_ids([10**6]), pack_ids([1] * 64)])
async def test_a_prompt_that_is_none_is_refused(made, prompt):
    with pytest.raises(BadInput, match=r"prompt|multiple of 4"):
        await made().sample_responses(SampleResponses(prompt=prompt, seeds=(1,)))


@pytest.mark.parametrize("seeds", [(), (-1,), (2**63,), (0,) * 5])
async def test_seeds_that_are_none_are_refused(made, seeds):
    with pytest.raises(BadInput, match="seeds: expected 1 to 4"):
        await made().sample_responses(SampleResponses(prompt=pack_ids([5]), seeds=seeds))


@pytest.mark.parametrize(
    "columns", [b"", b"[]", b"7", b"{", b'{"a": NaN}', b'{"a": \xff}x', msgspec.msgpack.encode({"a": b"\x00"})]
)
async def test_columns_that_are_no_json_object_are_refused_without_effect(made, columns):
    experience = made(train__prompts_per_step=1)
    with pytest.raises(BadInput, match="columns"):
        await experience.put_prompts(
            PutPrompts(step=0, prompts=(PromptData("1+1=", "2", pack_ids([5]), columns=columns),))
        )
    assert (experience.started, experience.held_bytes) == ([], 0)


async def test_a_step_is_started_once_whatever_is_sent_again(made):
    one = made()
    assert [(await one.put_prompts(PutPrompts(step=0))).new for _ in range(2)] == [True, False]
    own = PutPrompts(step=0, prompts=(PromptData("1+1=", "2", pack_ids([5])),))
    with pytest.raises(ServiceConflict, match="step 0 already has other prompts"):
        await one.put_prompts(own)
    with pytest.raises(ServiceConflict, match="step 7: with weight version 0 mode 'periodic' takes step 0"):
        await one.put_prompts(PutPrompts(step=7))
    assert one.started == [0]


def test_a_prompt_of_a_program_is_here_as_it_was_there(made):
    prompt = Prompt(
        id=prompt_id("1+1=", "2"), problem="1+1=", answer="2", token_ids=(5, 6), columns={"n": 1}, text="1+1=<think>"
    )
    found = made()._own_prompt(0, _prompt_data(prompt))
    assert replace(found, columns=dict(found.columns)) == prompt


async def test_prompts_count_until_their_step_is_over_and_are_refused_where_there_is_no_room(made):
    one = made(train__prompts_per_step=1)
    own = PutPrompts(step=0, prompts=(PromptData("1+1=", "2", pack_ids([5])),))
    assert [(await one.put_prompts(own)).new for _ in range(2)] == [True, False]
    size = one.held_bytes
    assert size > 0
    one.forget_step(0)
    assert one.held_bytes == 0
    full = made(train__prompts_per_step=1)
    full._max_bytes = size - 1
    with pytest.raises(ServiceFull, match=r"service\.max_mib"):
        await full.put_prompts(own)
    assert full.started == []


REQUESTS = {
    "verify_sync": messages.VerifySync(expected=()),
    "finish_sync": messages.FinishSync(version=0),
    "abort_sync": messages.AbortSync(version=0, reason=""),
    "connect_sync": messages.ConnectSync(version=0, transport="gloo", stages=()),
    "open_sync": messages.OpenSync(version=-1),
    "may_publish": messages.MayPublish(version=-1),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_part_of_a_publish_out_of_turn_is_refused(made, name):
    publishing = made(version=None).publishing
    with pytest.raises(ServiceConflict):
        await getattr(publishing, name)(REQUESTS[name])
    assert publishing.version is None
