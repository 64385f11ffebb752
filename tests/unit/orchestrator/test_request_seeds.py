"""Which requests of a run have a seed of their own, and what a group's responses say of it."""

import asyncio
import contextlib

import pytest

from engine.config import Config
from engine.data.loader import sampling_seed
from engine.orchestrator.rollout_service import rollout_service
from engine.run.trace import Trace
from engine.types import Prompt
from engine.wire.columns import open_group
from support.scripted import Scripted, publishing

PROMPT = Prompt("p", "1+1=", "2", (1, 2, 3))
SEEDS = [sampling_seed(0, 0, "p", number) for number in range(4)]


async def sampled(folder, model, synced, rollout):
    """(seeds that the instance got, the group)"""
    config = Config(
        model={"path": str(model)},
        rollout={"instances": 0, "group_size": 4, "max_context": 64, "max_new_tokens": 16, "timeout_s": 10, **rollout},
    )
    groups = []

    async def put(row):
        groups.append(open_group(row))

    scripted = Scripted()
    async with (
        scripted.serving() as url,
        rollout_service(
            config=config,
            model=model,
            folder=folder,
            settings=config.rollout if synced else config.evaluate,
            group_size=4,
            trace=Trace(folder / "trace", "orchestrator"),
            synced=synced,
            joined=True,
        ) as service,
        asyncio.timeout(20),
    ):
        await service.pool.connect_instances()
        service.pool.enter("one", url)
        async with publishing(service.pool, 0) if synced else contextlib.nullcontext():
            await service.producer.run(0, [(0, PROMPT)], put)
    return scripted.seeds, groups[0]


@pytest.mark.parametrize(
    ("rollout", "synced", "expected"),
    [
        ({"engine": "vllm"}, True, [None] * 4),
        ({"engine": "vllm", "deterministic": True}, True, SEEDS),
        ({"engine": "embedded"}, True, SEEDS),
        ({"engine": "vllm"}, False, SEEDS),  # an evaluation
    ],
)
async def test_a_request_has_a_seed_where_something_is_repeated_by_it(tmp_path, tiny_model, rollout, synced, expected):
    asked, group = await sampled(tmp_path, tiny_model, synced, rollout)
    assert sorted(asked, key=str) == sorted(expected, key=str)
    assert [response.seed for response in group.responses] == expected
