"""Evaluating a model on a benchmark: sample, verify, and say how sure the figures are."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.data.problems import Problems, read_problems
from engine.data.prompts import encode
from engine.rollout.service import rollout_service
from engine.run_folder import RunFolder, append_line
from engine.trace import Trace
from engine.types import Group

Z = 1.96
"""Of a 95 % interval."""


def evaluate(config: Config, model: Path, weight_version: int, folder: RunFolder) -> dict[str, Any]:
    """Sample `evaluate.samples` responses to each problem of the benchmark with the model in a Hugging Face folder.

    Appends a row to evaluations.jsonl and returns it: step, weight_version, benchmark, problems, samples, avg_at_k,
    pass_at_k, and the 95 % interval [ci_low, ci_high] of avg_at_k over problems. Over-long prompts are counted skips.
    """
    path = config.evaluate.benchmark or config.data.heldout
    problems = read_problems(path)
    groups, skipped = asyncio.run(_sample(config, model, problems, folder))
    row = {
        "step": weight_version,
        "weight_version": weight_version,
        "benchmark": Path(path).stem,
        "problems": len(groups),
        "skipped": skipped,
        "samples": config.evaluate.samples,
        **accuracy([[score.value for score in group.scores] for group in groups]),
        "response_length_mean": _mean([len(response.token_ids) for group in groups for response in group.responses]),
        "reward_timeouts": sum(score.status == "timeout" for group in groups for score in group.scores),
    }
    append_line(folder.evaluations, row)
    return row


def accuracy(values: Sequence[Sequence[float]]) -> dict[str, float]:
    """avg@k, pass@k and the 95 % Wilson interval of avg@k (Wilson 1927), problems being the independent units.

    values: per problem the k scores. pass@k counts a problem with any score of 1 or more. The interval is the binomial one
    for k = 1 and conservative above, where problems' means vary less; at 0 of 30 it is not [0, 0]. For rewards outside
    [0, 1] it is the normal one of the problems' means.
    """
    means = [_mean(row) for row in values]
    average = _mean(means)
    low, high = (_wilson if all(0 <= value <= 1 for row in values for value in row) else _normal)(average, means)
    passed = _mean([float(max(row) >= 1.0) for row in values])
    return {"avg_at_k": average, "pass_at_k": passed, "ci_low": low, "ci_high": high}


def _wilson(average: float, means: Sequence[float]) -> tuple[float, float]:
    n = len(means)
    centre = (average + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(average * (1 - average) / n + Z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _normal(average: float, means: Sequence[float]) -> tuple[float, float]:
    half = Z * statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
    return average - half, average + half


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


async def _sample(
    config: Config, model: Path, problems: Problems, folder: RunFolder
) -> tuple[list[Group], dict[str, int]]:
    """Groups of the benchmark's prompts, in their order, from instances started for this; and what was left out."""
    settings, trace = config.evaluate, Trace(folder.trace, "evaluation")
    groups: list[Group] = []

    async def put(group: Group) -> None:
        groups.append(group)

    async with rollout_service(config, model, folder.path, settings, settings.samples, trace) as service:
        template, context = config.data.prompt_template, config.rollout.max_context
        encoded = encode(problems, service.tokens.tokenizer, template, context)
        prompts = encoded.prompts[: settings.problems or None]
        await service.pool.connect()
        await service.producer.run(0, [(-1, prompt) for prompt in prompts], put)  # epoch -1: no training step's seeds
    return sorted(groups, key=lambda group: group.index), dict(encoded.skipped)
