"""Samples the groups of an evaluation, and scores them with further verifiers (`evaluate.also`) in addition to the
reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.config import Config
from engine.evaluation.intervals import accuracy_figures, is_right
from engine.orchestrator.producer import Land, Producer
from engine.orchestrator.verifier_pool import VerifierPool
from engine.types import Group, JsonObject, Prompt
from engine.wire.columns import Decode, Row, open_group

EPOCH = -1
"""Epoch in the sampling seeds. No training step uses it, and all models are sampled with the same seeds."""


async def further_figures(config: Config, groups: Sequence[Group]) -> JsonObject:
    """Return further keys of the evaluation's row, for each verifier NAME of `evaluate.also`.

    The keys are NAME_avg_at_k and NAME_pass_at_k with their intervals, and NAME_differs: the number of responses that
    either the reward or the verifier counts as right, but not both. Responses are scored in worker processes with the
    reward's time limit.
    """
    found: JsonObject = {}
    for name in config.evaluate.also:
        reward = config.reward.model_copy(update={"function": name, "functions": []})
        async with VerifierPool.of(reward, start_timeout_s=config.rollout.timeout_s) as verifier:
            scored = await asyncio.gather(*(verifier.score(group.prompt, group.responses) for group in groups))
        values = [[score.value for score in scores] for scores in scored]
        found |= {f"{name}_{key}": value for key, value in dict(accuracy_figures(values)).items()}
        pairs = [
            (is_right(ours, config.evaluate.pass_threshold), theirs.value >= 1.0)
            for group, scores in zip(groups, scored, strict=True)
            for ours, theirs in zip(group.scores, scores, strict=True)
        ]
        found[f"{name}_differs"] = sum(one != other for one, other in pairs)
    return found


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
