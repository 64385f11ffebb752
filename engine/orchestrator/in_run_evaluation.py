"""Evaluation inside a run, on the run's instances and with weights of a single version.

In `sync` and `periodic` it begins when all responses of the step are generated and the trainer is still training, when
the instances are idle. In the modes that generate batches ahead the instances are never idle. There it begins when all
of them serve the version, and its requests run along with those of the batches. In both cases the next publish waits
for the last response of the evaluation, at most `evaluate.max_wait_s`. Scoring and voting continue during the next
step, in separate verifier processes.

An evaluation whose responses have not all arrived by then is cut off and dropped, because the next weights differ and
the problems that were answered first are not a fair sample. An evaluation is also dropped if its results can't be
written, or if it is not scored soon after the last step. Each drop is reported.

Evaluation does not change what is trained: sampling seeds belong to the request, and a response that takes too long
does not count as a fault of the instance.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.errors import MetronomeError, TakenOver, counted
from engine.evaluation.benchmarks import EncodedBenchmark, encode_benchmarks, read_benchmarks
from engine.evaluation.results import Subject, record_evaluation
from engine.evaluation.tables import (
    dropped_file,
    evaluation_protocol,
    kind_of_average,
    old_tables,
    protocol_differences,
)
from engine.orchestrator.pool.instance_client import SamplingSettings
from engine.orchestrator.producer import Producer, raising_first, sample_groups
from engine.orchestrator.rollout_service import RolloutService
from engine.orchestrator.workers.verifier_pool import VerifierPool
from engine.run.files import append_line, read_lines, write_atomically
from engine.run.folder import RunFolder
from engine.run.logs import log_line
from engine.run.trace import KEPT_STEPS, Trace
from engine.types import Group, JsonObject

Notify = Callable[[], Awaitable[None]]
"""Wakes the coroutines that wait until weights may be published."""


class _EvaluationTrace(Trace):
    """Names an evaluation's rollouts "evaluate" on the timeline, since "rollout" counts as overlap with training."""

    def add_span(self, name: str, start: float, end: float, lane: str = "", **attributes: Any) -> None:  # noqa: ANN401
        super().add_span("evaluate" if name == "rollout" else name, start, end, lane, **attributes)


@dataclass(eq=False)
class _Evaluation:
    """State of one evaluation."""

    version: int
    """The weight version that is evaluated."""
    began: float
    """Monotonic time at which it began."""
    task: asyncio.Task[None] | None = None
    expected: int | None = None
    """Number of responses; None until the benchmarks are read and encoded."""
    finished: int = 0
    """Number of responses that have arrived."""
    generated: float | None = None
    """Monotonic time at which the last response arrived or the evaluation ended; None before."""
    publish_asked: float | None = None
    """Monotonic time since which the next publish has been waiting; None if it is not waiting."""
    cut: str = ""
    """Why the evaluation was cut off; empty if it was not."""

    @property
    def exposed_s(self) -> float:
        """Seconds that the next publish has waited for the evaluation."""
        if self.publish_asked is None:
            return 0.0
        return max(0.0, (self.generated or time.monotonic()) - self.publish_asked)

    @property
    def stage_progress(self) -> str:
        """What is done and what is not, for the message that says why the evaluation was cut off."""
        if self.expected is None:
            return "its problems were not yet encoded, or its verifiers not yet started,"
        if self.generated is None:
            return f"{self.finished} of {self.expected} responses had arrived"
        return "not all of its responses were scored and voted on"


class InRunEvaluation:
    """Evaluates at every `evaluate.every`th step, except the last one.

    The weights of the last step are gone before a result could be used.
    """

    def __init__(self, config: Config, folder: RunFolder, service: RolloutService, notify: Notify) -> None:
        self._config = config
        self._folder = folder
        self._service = service
        self._notify = notify
        self._verifier = VerifierPool(config.reward, folder.logs / "verifier-evaluation.log")
        self._trace = _EvaluationTrace(folder.trace, "evaluation")
        self._prepared: asyncio.Task[list[EncodedBenchmark]] | None = None
        self._recording = asyncio.Lock()
        """Held while results are recorded, so that they are in the order of their versions."""
        self._newest: _Evaluation | None = None
        self._evaluations: dict[asyncio.Task[None], _Evaluation] = {}

    def begin_run(self, start: int) -> None:
        """Begin the run with step `start`: delete results of later versions, and prepare the benchmarks (once)."""
        cut_evaluations(self._folder, start)
        self._prepared = self._prepared or asyncio.create_task(self._prepare())

    def evaluate_version(self, version: int) -> None:
        """Evaluate a version if it is due. The instances hold this version, and keep it until `allows_publish` is
        true."""
        if version % self._config.evaluate.every or version == self._config.train.steps - 1:
            return
        self._newest = one = _Evaluation(version, time.monotonic())
        one.task = asyncio.create_task(self._evaluate_or_drop(one))
        self._evaluations[one.task] = one

    def check_evaluations(self) -> None:
        """Raise the unexpected exception of an evaluation, if any. Expected ones were reported with the drop."""
        for task in [task for task in self._evaluations if task.done()]:
            del self._evaluations[task]
            task.result()

    def allows_publish(self, serves: bool) -> bool:
        """Return whether weights may be published now. The first "no" starts the time limit `evaluate.max_wait_s`. If
        no instance `serves` any more, the evaluated weights are lost, and the evaluation is cut off."""
        one = self._newest
        if one is None or one.generated is not None:
            return True
        if not serves:
            self._cut_off(one, "when the last instance that held its weights was gone")
            return True
        if one.publish_asked is None:
            one.publish_asked = time.monotonic()
            limit = self._config.evaluate.max_wait_s
            asyncio.get_running_loop().call_later(limit, self._cut_if_late, one, limit)
        return False

    @property
    def under_way(self) -> JsonObject | None:
        """The version that is being sampled, how many of its responses have arrived, and how many there are in total;
        None if none is being sampled."""
        one = self._newest
        if one is None or one.generated is not None or one.expected is None:
            return None
        return {"version": one.version, "finished": one.finished, "expected": one.expected}

    async def finish_evaluations(self) -> None:
        """Wait after the last step until the evaluations are scored and voted on, and drop those that are late.

        Waits at most `evaluate.max_wait_s`, and at most half of train.timeout_s, because the trainer's ranks wait for
        this with the limit train.timeout_s (`RankGroup.from_first`).
        """
        if self._evaluations:
            limit = min(self._config.evaluate.max_wait_s, self._config.train.timeout_s / 2)
            await asyncio.wait(set(self._evaluations), timeout=limit)
            await self._cut_off_all(
                f"when the last step had waited {limit:g} s for it (evaluate.max_wait_s, at most half of "
                "train.timeout_s)"
            )

    async def close(self) -> None:
        """Stop the verifiers, and drop the evaluations in progress but those that are sampled: they are recorded, which
        may take `reward.timeout_s`."""
        if sampled := {task for task, one in self._evaluations.items() if one.generated is not None}:
            await asyncio.wait(sampled, timeout=self._config.reward.timeout_s)
        await self._cut_off_all("when the run ended")
        if self._prepared is not None:
            self._prepared.cancel()
            await asyncio.gather(self._prepared, return_exceptions=True)
        self._verifier.close()
        self._write_timeline()

    async def _prepare(self) -> list[EncodedBenchmark]:
        """Read and encode the benchmarks and start the verifiers.

        This runs while the first step is generated.
        """
        benchmarks = await asyncio.to_thread(read_benchmarks, self._config)
        encoded = await asyncio.to_thread(encode_benchmarks, self._config, benchmarks, self._service.tokenizer)
        await self._verifier.start(self._service.tokenizer.for_verifiers)
        return encoded

    async def _evaluate_or_drop(self, one: _Evaluation) -> None:
        try:
            await self._evaluate(one)
        except TakenOver:
            raise  # the newer orchestrator drops its own evaluations
        except (MetronomeError, OSError) as error:  # a full disk ends the evaluation, not the training
            self._report_dropped(one, f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            if not one.cut:
                raise
            self._report_dropped(one, one.cut)
        finally:
            one.generated = one.generated or time.monotonic()
            self._write_timeline()
            await self._notify()

    async def _evaluate(self, one: _Evaluation) -> None:
        assert self._prepared is not None
        todo = [each for each in await asyncio.shield(self._prepared) if not self._is_evaluated(each, one.version)]
        one.expected = sum(len(each.prompts) for each in todo) * self._config.evaluate.samples
        if not todo:
            return

        async def on_finished(index: int, number: int) -> None:
            one.finished += 1
            if one.finished == one.expected:
                one.generated = time.monotonic()
                await self._notify()

        producer = self._make_producer()
        decode = self._service.tokenizer.decode
        sample = partial(sample_groups, producer, decode=decode, step=one.version, on_finished=on_finished)
        with raising_first():
            async with asyncio.TaskGroup() as tasks:  # the first failure ends the others
                sampling = [tasks.create_task(sample(each.prompts)) for each in todo]
        async with self._recording:
            for each, groups in zip(todo, [task.result() for task in sampling], strict=True):
                await self._record_results(one, each, groups)

    async def _record_results(self, one: _Evaluation, benchmark: EncodedBenchmark, groups: Sequence[Group]) -> None:
        assert one.generated is not None
        more = {"in_run": True, "seconds": one.generated - one.began, "exposed_s": one.exposed_s}
        subject = Subject(self._config.model.path, one.version)
        row = await record_evaluation(
            config=self._config,
            folder=self._folder,
            subject=subject,
            benchmark=benchmark,
            groups=groups,
            verifier=self._verifier,
            sampled=one.version,
            more=more,
        )
        for table in old_tables(self._folder, one.version - KEPT_STEPS + 1):
            table.unlink(missing_ok=True)
        figures = f"avg@{row['samples']} {row['avg_at_k']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}]"
        self._tell(
            f"version {one.version}: {kind_of_average(row['partial_scores'])} {figures} on "
            f"{counted(row['problems'], 'problem')} of {benchmark.name}; took {more['seconds']:.1f} s, of which "
            f"training waited {more['exposed_s']:.1f} s"
        )

    def _tell(self, text: str) -> None:
        """Tell it in the log and on the console. On the page it is a point of a curve."""
        log_line(f"evaluate: {text}")
        self._folder.events.send("notice", ["evaluate", text])

    def _make_producer(self) -> Producer:
        settings = self._config.evaluate
        stop = self._service.tokenizer.stop_ids
        return Producer(
            pool=self._service.pool,
            verifier=self._verifier,
            sampling=SamplingSettings.of(settings, Path(self._config.model.path), stop),
            group_size=settings.samples,
            seed=self._config.run.seed,
            trace=self._trace,
            programs=self._service.programs,
            deadlines_count=False,  # responses of an evaluation may be longer than those of a step
        )

    def _is_evaluated(self, benchmark: EncodedBenchmark, version: int) -> bool:
        """Return whether the version was evaluated already: the base model before the run, or a step that is being
        redone."""
        how = evaluation_protocol(self._config, benchmark.name, benchmark.prompts)
        which = (self._config.model.path, version)
        return any(
            (row["model"], row["weight_version"]) == which and not protocol_differences(row["protocol"], how)
            for row in read_lines(self._folder.evaluations)
            if "protocol" in row
        )

    def _cut_if_late(self, one: _Evaluation, limit: float) -> None:
        if one.generated is None:
            self._cut_off(one, f"when training had waited {limit:g} s for them (evaluate.max_wait_s)")

    def _cut_off(self, one: _Evaluation, when: str) -> None:
        if one.task is not None and not one.task.done() and not one.cut:
            one.cut = f"{one.stage_progress} {when}"
            one.task.cancel()

    async def _cut_off_all(self, when: str) -> None:
        """Cut off all evaluations in progress, and wait until each is reported."""
        for one in self._evaluations.values():
            self._cut_off(one, when)
        await asyncio.gather(*self._evaluations, return_exceptions=True)

    def _report_dropped(self, one: _Evaluation, reason: str) -> None:
        """Report a dropped evaluation, on the console and in dropped.jsonl."""
        row = {"weight_version": one.version, "reason": reason, "exposed_s": one.exposed_s}
        path = dropped_file(self._folder)
        self._tell(f"version {one.version} dropped: {reason}; training waited {one.exposed_s:.1f} s")
        if self._folder.fence.is_passed:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_line(path, row)
        except OSError as error:
            log_line(f"evaluate: {path} can't be written: {error}")

    def _write_timeline(self) -> None:
        """Write the timeline. A failure is only printed, because training does not need the timeline."""
        try:
            self._trace.flush()
        except OSError as error:
            log_line(f"evaluate: the timeline of evaluations can't be written: {error}")


def cut_evaluations(folder: RunFolder, start: int) -> None:
    """Delete the run's own results of versions after `start`, where the run begins again. Their weights are lost."""
    rows = list(read_lines(folder.evaluations))
    kept = [row for row in rows if not (row.get("in_run") and row["weight_version"] > start)]
    if len(kept) < len(rows):
        write_atomically(folder.evaluations, "".join(json.dumps(row) + "\n" for row in kept))
