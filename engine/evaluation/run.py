"""Evaluating a model on benchmarks: sample, verify, vote, compare with the base, and say how sure the figures are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.data.prompts import encode
from engine.evaluation import paired, tables
from engine.evaluation.benchmarks import Benchmark, read_benchmarks
from engine.evaluation.figures import accuracy, pass_curve
from engine.evaluation.votes import Verifier, majorities
from engine.rollout.producer import Producer
from engine.rollout.registry import registry
from engine.rollout.service import rollout_service
from engine.rollout.tokens import Tokens
from engine.run_folder import RunFolder, append_line
from engine.trace import Trace
from engine.types import Group, Prompt

EPOCH = -1
"""Of the sampling seeds: no training step's. Two models are sampled with the same seeds."""


@dataclass(frozen=True)
class Encoded:
    """A benchmark's prompts, and what was left out of it (reason → rows)."""

    name: str
    prompts: tuple[Prompt, ...]
    skipped: Mapping[str, int]


@dataclass(frozen=True)
class Subject:
    """Which weights are evaluated."""

    model: str
    """The folder they were loaded from (for those of a running training, the base model's)."""
    version: int


def evaluate(
    config: Config, model: Path, weight_version: int, folder: RunFolder, meeting: Path | None = None
) -> list[dict[str, Any]]:
    """Sample `evaluate.samples` responses to each problem of the benchmarks with the model in a Hugging Face folder.

    Appends a row per benchmark to evaluations.jsonl and returns them (docs/evaluation.md says what is in a row), and
    writes a table with every response each. Over-long prompts are counted skips. `meeting`: a folder where instances that others
    start, with this very model, find the evaluation as they find a run in its folder; then none need be declared. Raises
    ProcessDied when no instance is there for rollout.wait_s.
    """
    benchmarks = read_benchmarks(config)
    return asyncio.run(_evaluate(config, model, weight_version, folder, benchmarks, meeting))


async def _evaluate(
    config: Config, model: Path, version: int, folder: RunFolder, benchmarks: Sequence[Benchmark], meeting: Path | None
) -> list[dict[str, Any]]:
    settings, trace, joined = config.evaluate, Trace(folder.trace, "evaluation"), meeting is not None
    config = with_context(config)
    async with (
        rollout_service(config, model, folder.path, settings, settings.samples, trace, joined=joined) as service,
        AsyncExitStack() as stack,
    ):
        if meeting is not None:
            await stack.enter_async_context(registry(service.pool, config, meeting))
        encoded = encode_all(config, benchmarks, service.tokens)
        await service.pool.connect()
        started = time.perf_counter()
        sampled = await asyncio.gather(*(sample(service.producer, one.prompts) for one in encoded))
        figures = {"seconds": time.perf_counter() - started}
        subject = Subject(str(model.resolve()), version)
        return [await record(config, folder, subject, one, groups, service.verifier, figures)
                for one, groups in zip(encoded, sampled, strict=True)]  # fmt: skip


def with_context(config: Config) -> Config:
    """The config for instances that are started for an evaluation: `evaluate.max_context`, if given, is their context."""
    if not config.evaluate.max_context:
        return config
    rollout = config.rollout.model_copy(update={"max_context": config.evaluate.max_context})
    return config.model_copy(update={"rollout": rollout})


def encode_all(config: Config, benchmarks: Sequence[Benchmark], tokens: Tokens) -> list[Encoded]:
    """The benchmarks' prompts, at most `evaluate.problems` of each."""
    template, context, most = config.data.prompt_template, config.rollout.max_context, config.evaluate.problems or None
    encoded = [(one.name, encode(one.problems, tokens.tokenizer, template, context)) for one in benchmarks]
    return [Encoded(name, found.prompts[:most], found.skipped) for name, found in encoded]


async def sample(producer: Producer, prompts: Sequence[Prompt], step: int = 0, land: Any = None) -> list[Group]:  # noqa: ANN401
    """Groups of the prompts, in their order."""
    groups: list[Group] = []

    async def put(group: Group) -> None:
        groups.append(group)

    await producer.run(step, [(EPOCH, prompt) for prompt in prompts], put, land)
    return sorted(groups, key=lambda group: group.index)


async def record(
    config: Config, folder: RunFolder, subject: Subject, benchmark: Encoded, groups: Sequence[Group], verifier: Verifier,
    more: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Vote, compute, write the table, compare with the base, append the row and return it. `more`: further keys."""
    votes = await majorities(groups, config.reward.function, verifier)
    how = tables.protocol(config, benchmark.name, [group.prompt for group in groups])
    table = tables.path_of(folder, subject.model, subject.version, how)
    await asyncio.to_thread(tables.write, table, groups, votes)
    values = [[score.value for score in group.scores] for group in groups]
    row = {
        "step": subject.version,
        "weight_version": subject.version,
        "benchmark": benchmark.name,
        "model": subject.model,
        "problems": len(groups),
        "skipped": dict(benchmark.skipped),
        "samples": config.evaluate.samples,
        **accuracy(values, [vote.value for vote in votes] if votes is not None else None),
        "pass_curve": pass_curve(values),
        **_lengths(groups, config.evaluate.max_new_tokens),
        "reward_timeouts": sum(score.status == "timeout" for group in groups for score in group.scores),
        "protocol": how,
        "table": str(table.relative_to(folder.path)),
        **more,
    }
    if (base := tables.baseline(folder, row)) is not None:
        row["against"] = against(row, base, folder.path, config.evaluate.confidence)
    append_line(folder.evaluations, row)
    return row


def against(row: Mapping[str, Any], base: Mapping[str, Any], folder: Path, confidence: float) -> dict[str, Any]:
    """The paired comparison of two rows of evaluations.jsonl whose tables lie in the folder, with what it is against."""
    ours, theirs = (tables.means(folder / one["table"]) for one in (row, base))
    found = paired.compare(ours, theirs, row["samples"], confidence)
    return {"weight_version": base["weight_version"], "model": base["model"], **found.as_dict()}


def _lengths(groups: Sequence[Group], limit: int) -> dict[str, Any]:
    """Mean length in tokens, how many a limit cut, and how many the context cut before max_new_tokens was reached."""
    responses = [response for group in groups for response in group.responses]
    cut = [response for response in responses if response.truncated]
    return {
        "response_length_mean": sum(len(response.token_ids) for response in responses) / len(responses),
        "truncated": len(cut),
        "context_cut": sum(len(response.token_ids) < limit for response in cut),
    }
