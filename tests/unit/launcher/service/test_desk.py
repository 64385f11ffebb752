"""The order of requests that the desk refuses, without instances; tests/integration/test_service.py has them."""

import asyncio
from types import SimpleNamespace

import pytest

from engine.data.loader import PromptLoader
from engine.errors import BadInput, ServiceConflict, ServiceFull
from engine.launcher.service.desk import SAMPLED_AT_ONCE, ServiceDesk
from engine.run.trace import Trace
from engine.types import Prompt
from engine.wire import messages
from engine.wire.codec import pack_ids
from engine.wire.service_messages import PutPrompts, SampleResponses
from support.runs import config_of


class Producer:
    """Samples nothing until it may."""

    def __init__(self):
        self.may = asyncio.Event()

    async def sample(self, step, prompt, seeds):
        await self.may.wait()
        return []


@pytest.fixture
def desk(settings, tmp_path):
    config = config_of(settings | {"rollout.concurrency": 1})
    pool = SimpleNamespace(size=1, failure=None, sync=None)
    return ServiceDesk(
        config=config,
        trace=Trace(tmp_path, "launcher"),
        loader=PromptLoader([Prompt("p", "1+1=", "2", (5, 6))], 0, config.train.prompts_per_step),
        service=SimpleNamespace(pool=pool, producer=Producer()),
        weights=tmp_path,
    )


SAMPLE = SampleResponses(prompt=pack_ids([5, 6]), seeds=(1,))


async def test_nothing_is_sampled_or_started_before_the_first_version(desk):
    with pytest.raises(ServiceConflict, match="no weight version was published yet"):
        await desk.sample(SAMPLE)
    with pytest.raises(ServiceConflict, match="no weight version was published yet"):
        await desk.put_prompts(PutPrompts(step=0), size=10)


async def test_groups_that_are_sampled_for_programs_have_a_limit(desk):
    desk.version = 0
    most = SAMPLED_AT_ONCE * 1
    waiting = [asyncio.create_task(desk.sample(SAMPLE)) for _ in range(most)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceFull, match=f"{most} groups are being sampled"):
        await desk.sample(SAMPLE)
    desk._service.producer.may.set()
    await asyncio.gather(*waiting)
    await desk.sample(SAMPLE)


@pytest.mark.parametrize("prompt", [b"", b"123", pack_ids([-1]), pack_ids([10**6]), pack_ids([1] * 64)])
async def test_a_prompt_that_is_none_is_refused(desk, prompt):
    desk.version = 0
    with pytest.raises(BadInput, match=r"prompt|bytes are no int32"):
        await desk.sample(SampleResponses(prompt=prompt, seeds=(1,)))


@pytest.mark.parametrize("seeds", [(), (-1,), (2**63,), (0,) * 5])
async def test_seeds_that_are_none_are_refused(desk, seeds):
    desk.version = 0
    with pytest.raises(BadInput, match="seeds: expected 1 to 4"):
        await desk.sample(SampleResponses(prompt=pack_ids([5]), seeds=seeds))


REQUESTS = [
    messages.VerifySync(expected=()),
    messages.FinishSync(version=0, snapshot=""),
    messages.AbortSync(version=0, reason=""),
    messages.ConnectSync(version=0, transport="gloo", stages=()),
    messages.OpenSync(version=-1),
    messages.MayPublish(version=-1),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=[type(one).__name__ for one in REQUESTS])
async def test_a_part_of_a_publish_out_of_turn_is_refused(desk, request_):
    with pytest.raises(ServiceConflict):
        await desk.sync(request_)
    assert desk.version is None
