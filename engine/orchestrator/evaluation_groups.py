"""Samples the groups of an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.orchestrator.producer import Land, Producer
from engine.types import Group, Prompt
from engine.wire.columns import Decode, Row, open_group

EPOCH = -1
"""Epoch in the sampling seeds. No training step uses it, and all models are sampled with the same seeds."""


async def sample_groups(
    producer: Producer,
    prompts: Sequence[Prompt],
    decode: Decode,
    step: int = 0,
    land: Land | None = None,
    scored: Callable[[Sequence[float]], None] = lambda rewards: None,
) -> list[Group]:
    """Generate a group for each prompt. Return the groups in the order of the prompts, with the text of the responses.
    `land` gets each response, and `scored` the rewards of each group, as they arrive."""
    groups: list[Group] = []

    async def put(row: Row) -> None:
        group = await asyncio.to_thread(open_group, row, decode=decode)
        groups.append(replace(group, prompt=prompts[group.index]))
        scored([score.value for score in group.scores])

    await producer.run(step, [(EPOCH, prompt) for prompt in prompts], put, land)
    return sorted(groups, key=lambda group: group.index)
