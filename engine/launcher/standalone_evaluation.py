"""Evaluating a model on benchmarks: its responses are sampled on rollout instances of the evaluation's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.evaluation.benchmarks import Benchmark, encode_benchmarks, read_benchmarks, with_evaluation_context
from engine.evaluation.results import Subject, record
from engine.launcher.pool.joining import serve_joining
from engine.launcher.producer import Producer
from engine.launcher.rollout_service import rollout_service
from engine.run.folder import RunFolder
from engine.run.trace import Trace
from engine.types import Group, Prompt

EPOCH = -1
"""Of the sampling seeds: no training step's. Two models are sampled with the same seeds."""


def evaluate(
    config: Config, model: Path, weight_version: int, folder: RunFolder, meeting: Path | None = None
) -> list[dict[str, Any]]:
    """Sample `evaluate.samples` responses to each problem of the benchmarks with the model in a Hugging Face folder.

    Appends a row per benchmark to evaluations.jsonl and returns them (docs/evaluation.md says what is in a row), and
    writes a table with every response each. Over-long prompts are counted skips. `meeting`: a folder where instances
    that others start, with this very model, find the evaluation as they find a run in its folder; then none need be
    declared. Raises ProcessDied when no instance is there for rollout.wait_s.
    """
    benchmarks = read_benchmarks(config)
    return asyncio.run(
        _evaluate(
            config=config, model=model, version=weight_version, folder=folder, benchmarks=benchmarks, meeting=meeting
        )
    )


async def _evaluate(
    config: Config, model: Path, version: int, folder: RunFolder, benchmarks: Sequence[Benchmark], meeting: Path | None
) -> list[dict[str, Any]]:
    settings = config.evaluate
    trace = Trace(folder.trace, "evaluation")
    joined = meeting is not None
    config = with_evaluation_context(config)
    async with (
        rollout_service(
            config=config,
            model=model,
            folder=folder.path,
            settings=settings,
            group_size=settings.samples,
            trace=trace,
            joined=joined,
        ) as service,
        AsyncExitStack() as stack,
    ):
        if meeting is not None:
            await stack.enter_async_context(serve_joining(service.pool, config, meeting))
        encoded = encode_benchmarks(config, benchmarks, service.tokenizer)
        await service.pool.connect()
        started = time.perf_counter()
        sampled = await asyncio.gather(*(sample(service.producer, one.prompts) for one in encoded))
        figures = {"seconds": time.perf_counter() - started}
        subject = Subject(str(model.resolve()), version)
        return [
            await record(
                config=config,
                folder=folder,
                subject=subject,
                benchmark=one,
                groups=groups,
                verifier=service.verifier,
                more=figures,
            )
            for one, groups in zip(encoded, sampled, strict=True)
        ]


async def sample(producer: Producer, prompts: Sequence[Prompt], step: int = 0, land: Any = None) -> list[Group]:  # noqa: ANN401
    """Groups of the prompts, in their order."""
    groups: list[Group] = []

    async def put(group: Group) -> None:
        groups.append(group)

    await producer.run(step, [(EPOCH, prompt) for prompt in prompts], put, land)
    return sorted(groups, key=lambda group: group.index)
