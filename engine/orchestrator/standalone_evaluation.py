"""Evaluates a model on benchmarks outside a run, with its own rollout instances.

No trainer sends weights: the instances load them from disk. One that joins was started from a folder of the same
content, and serves these weights again if a training has given it others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from engine.config import Config
from engine.errors import counted
from engine.evaluation.benchmarks import (
    Benchmark,
    encode_benchmarks,
    read_benchmarks,
    run_clock,
    with_evaluation_context,
)
from engine.evaluation.results import Subject, record_evaluation
from engine.evaluation.tables import kind_of_average
from engine.model.shape import content_hash
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.producer import sample_groups
from engine.orchestrator.publish.update_calls import UpdateCalls
from engine.orchestrator.rollout_service import rollout_service
from engine.orchestrator.run_events import RunEvents
from engine.orchestrator.server import Server
from engine.run.disk import raise_limit
from engine.run.folder import RunFolder
from engine.run.limits import check_open_files
from engine.run.progress import Progress
from engine.run.run_inputs import check_model, code_of, find_inputs
from engine.run.trace import Trace
from engine.types import JsonObject, Score

START_VERSION = 0
"""Instances name the weights that they were started from so."""


@dataclass
class EvaluationProgress:
    """Progress of an evaluation. The evaluation writes it, and another thread may read it at any time."""

    instances: int = 1
    """Number of instances that it starts."""
    expected: int = 0
    """Number of responses; 0 until the benchmarks are encoded and the instances serve."""
    finished: int = 0
    """Number of responses that have arrived."""
    scored: int = 0
    """Number of responses that the reward has seen."""
    excluded: int = 0
    """Number of these that have no score."""
    score: float = 0.0
    """Sum of the scores so far."""
    whole_scores: bool = True
    """Whether each score so far is 0 or 1, so that their mean is an accuracy."""
    notices: RunEvents = field(default_factory=RunEvents)
    """Receives problems that occur during the evaluation."""

    def count_group(self, scores: Sequence[Score]) -> None:
        """Count the scores of a finished group."""
        rewards = [score.value for score in scores if not score.excluded]
        self.scored += len(scores)
        self.excluded += len(scores) - len(rewards)
        self.score += sum(rewards)
        self.whole_scores = self.whole_scores and all(reward in (0.0, 1.0) for reward in rewards)
        self.notices.report_due()

    def progress(self) -> Progress:
        """How far it is."""
        if not self.expected:
            return Progress(f"starting {counted(self.instances, 'instance')}")
        if self.finished == self.expected == self.scored:
            return Progress(f"{self.finished:,} responses are scored; votes and intervals", 1.0)
        text = f"{self.finished:,} of {counted(self.expected, 'response')}"
        if known := self.scored - self.excluded:
            text += f", {kind_of_average(not self.whole_scores)} of these {self.score / known:.3f}"
        return Progress(text, self.finished / self.expected)


def evaluate_model(
    config: Config,
    model: Path,
    weight_version: int,
    folder: RunFolder,
    meeting: Path | None = None,
    progress: EvaluationProgress | None = None,
) -> list[JsonObject]:
    """Sample `evaluate.samples` responses to each problem of the benchmarks with the model in a Hugging Face folder.

    Appends a row per benchmark to evaluations.jsonl and returns the rows (docs/evaluation.md describes them). Writes a
    table of all responses per benchmark. Prompts that are too long are skipped and counted. `meeting`: a folder through
    which instances that were started elsewhere with the same model join the evaluation, as they join a run through its
    folder. With it, the evaluation need not start any instances. `progress` is kept up to date. Raises ProcessDied if
    there is no instance for rollout.wait_s seconds, and BadInput for input that can't be evaluated.
    """
    check_open_files(config)
    check_model(folder.path, config, model)
    progress = progress or EvaluationProgress()
    if code_of(folder.path, config, "reward") != find_inputs(config, model, ["reward"])["reward"]:
        text = (
            "the files of the reward or the program differ from those of the run's start, whose copies are used; with "
            "another run.name the present ones are"
        )
        progress.notices.happened("evaluate", "code", text)
    raise_limit()
    benchmarks = read_benchmarks(config)
    return asyncio.run(
        _evaluate(
            config=config,
            model=model,
            version=weight_version,
            folder=folder,
            benchmarks=benchmarks,
            meeting=meeting,
            progress=progress,
        )
    )


async def _evaluate(
    config: Config,
    model: Path,
    version: int,
    folder: RunFolder,
    benchmarks: Sequence[Benchmark],
    meeting: Path | None,
    progress: EvaluationProgress,
) -> list[JsonObject]:
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
            notices=progress.notices,
        ) as service,
        AsyncExitStack() as stack,
    ):
        service.pool.weights = await asyncio.to_thread(content_hash, model)
        encoded = encode_benchmarks(config, benchmarks, service.tokenizer)
        timed = config.data.prompt_template == "chat" and "strftime_now" in (service.tokenizer.chat_template or "")
        if timed and run_clock(config) is None:
            text = "the chat template writes the present time into prompts; other times' evaluations can't be compared"
            progress.notices.happened("evaluate", "clock", text)
        if meeting is not None:
            calls = UpdateCalls(None, config.rollout.timeout_s)

            async def restore(instance: Instance) -> None:
                if instance.declared is None:  # its folder's hash was compared when it joined
                    await calls.restore_base(instance, "the weights that are evaluated")
                instance.record_version(START_VERSION)

            service.pool.check_arrivals(restore)
            server = Server(config)
            server.serve_pool(service.pool)
            await stack.enter_async_context(server.listening(meeting))
        await service.pool.connect_instances()
        started = time.perf_counter()
        progress.expected = sum(len(one.prompts) for one in encoded) * settings.samples

        async def on_finished(index: int, number: int) -> None:
            progress.finished += 1

        decode = service.tokenizer.decode
        sampled = await asyncio.gather(
            *(
                sample_groups(
                    service.producer, one.prompts, decode, on_finished=on_finished, scored=progress.count_group
                )
                for one in encoded
            )
        )
        progress.notices.close()
        figures = {"seconds": time.perf_counter() - started}
        subject = Subject(str(model.resolve()), version)
        return [
            await record_evaluation(
                config=config,
                folder=folder,
                subject=subject,
                benchmark=one,
                groups=groups,
                verifier=service.verifier,
                sampled=START_VERSION,
                more=figures,
            )
            for one, groups in zip(encoded, sampled, strict=True)
        ]
