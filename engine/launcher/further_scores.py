"""Scores of an evaluation's responses by further verifiers (`evaluate.also`), beside those of the run's reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.config import Config
from engine.evaluation.intervals import accuracy
from engine.launcher.verifier_pool import VerifierPool
from engine.types import Group, JsonObject


async def further_figures(config: Config, groups: Sequence[Group]) -> JsonObject:
    """Further keys of the evaluation's row, for each verifier NAME of `evaluate.also`.

    NAME_avg_at_k and NAME_pass_at_k with their intervals, and NAME_differs, the number of responses that one of reward
    and verifier takes for right and the other does not. Responses are scored in worker processes with the reward's time
    limit.
    """
    found: JsonObject = {}
    for name in config.evaluate.also:
        reward = config.reward.model_copy(update={"function": name})
        async with VerifierPool.of(reward, start_timeout_s=config.rollout.timeout_s) as verifier:
            scored = await asyncio.gather(*(verifier.score(group.prompt, group.responses) for group in groups))
        values = [[score.value for score in scores] for scores in scored]
        found |= {f"{name}_{key}": value for key, value in dict(accuracy(values)).items()}
        pairs = [
            (ours.value >= 1.0, theirs.value >= 1.0)
            for group, scores in zip(groups, scored, strict=True)
            for ours, theirs in zip(group.scores, scores, strict=True)
        ]
        found[f"{name}_differs"] = sum(one != other for one, other in pairs)
    return found
