"""Evaluation inside a run, at the drain of a step: all its responses are generated, and the trainer still trains.

Then the instances are idle and hold exactly the step's weights, so the benchmark is sampled on them. Weights wait with
their next move until the last response of the evaluation is in, at most `evaluate.max_wait_s`; scoring and voting go on
beside the next step, in verifier processes of their own. An evaluation that is not through by then is cut off and
dropped: the next weights are others, and the problems that were answered first are not a fair sample. So is one that
can't be written, and one that is not scored soon after the last step; each is reported. Nothing here changes what is
trained: no request of a step is ever beside one of an evaluation, sampling seeds belong to the request, and an
evaluation's deadlines are not held against an instance.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.errors import MetronomeError, StaleRolloutError
from engine.evaluation.benchmarks import EncodedBenchmark, encode_benchmarks, read_benchmarks
from engine.evaluation.results import Subject, record
from engine.evaluation.tables import differing, protocol
from engine.launcher.pool.instance_client import SamplingSettings
from engine.launcher.producer import Producer, first_leaf
from engine.launcher.rollout_service import RolloutService
from engine.launcher.standalone_evaluation import sample
from engine.launcher.verifier_pool import VerifierPool
from engine.run.files import append_line, read_lines, write_atomically
from engine.run.folder import RunFolder
from engine.run.trace import Trace
from engine.types import Group, Landed

Notify = Callable[[], Awaitable[None]]
"""Tells whoever waits for weights to move that they may now."""


class _Spans(Trace):
    """Draws an evaluation's rollouts under another name than a step's, which count as overlap with training."""

    def add(self, name: str, start: float, end: float, lane: str = "", **attributes: Any) -> None:  # noqa: ANN401
        super().add("evaluate" if name == "rollout" else name, start, end, lane, **attributes)


@dataclass(eq=False)
class _Evaluation:
    """One evaluation: its weights, how far it is, and since when weights wait for it (monotonic seconds)."""

    version: int
    began: float
    task: asyncio.Task[None] | None = None
    expected: int | None = None
    """Responses; not known before the benchmarks are read."""
    landed: int = 0
    generated: float | None = None
    asked: float | None = None
    cut: str = ""
    """Why it was cut off; empty while it was not."""

    @property
    def exposed_s(self) -> float:
        """Seconds that weights waited for it."""
        return max(0.0, (self.generated or time.monotonic()) - self.asked) if self.asked is not None else 0.0

    @property
    def how_far(self) -> str:
        """What was there and what was not, for whoever reads why it was cut off."""
        if self.expected is None:
            return "its problems were not read and encoded, or its verifiers not started,"
        if self.generated is None:
            return f"{self.landed} of {self.expected} responses were in"
        return "its responses were not all scored and voted on"


class DrainEvaluation:
    """Evaluates in every `evaluate.every`th step but the last,
    whose weights are gone before anything could be done with them."""

    def __init__(self, config: Config, folder: RunFolder, service: RolloutService, notify: Notify) -> None:
        self._config = config
        self._folder = folder
        self._service = service
        self._notify = notify
        reward = config.reward
        self._verifier = VerifierPool(
            reward.function,
            reward.workers,
            reward.timeout_s,
            reward.on_error,
            log=folder.logs / "verifier-evaluation.log",
        )
        self._trace = _Spans(folder.trace, "evaluation")
        self._prepared: asyncio.Task[list[EncodedBenchmark]] | None = None
        self._round: _Evaluation | None = None
        self._rounds: dict[asyncio.Task[None], _Evaluation] = {}

    def begin(self, start: int) -> None:
        """The run starts with this step: forget what a lost attempt evaluated later, and prepare (once)."""
        cut(self._folder, start)
        self._prepared = self._prepared or asyncio.create_task(self._prepare())

    def drained(self, step: int) -> None:
        """All responses of the step are generated; the instances hold version `step` until the next move of weights."""
        if step % self._config.evaluate.every or step == self._config.train.steps - 1:
            return
        self._round = one = _Evaluation(step, time.monotonic())
        one.task = asyncio.create_task(self._run(one))
        self._rounds[one.task] = one

    def check(self) -> None:
        """Raise what is a mistake of ours in an evaluation; others were reported when it was dropped."""
        for task in [task for task in self._rounds if task.done()]:
            del self._rounds[task]
            task.result()

    def allows_publish(self) -> bool:
        """Whether weights may move now. The first no starts the clock of `evaluate.max_wait_s`."""
        one = self._round
        if one is None or one.generated is not None:
            return True
        if one.asked is None:
            one.asked = time.monotonic()
            limit = self._config.evaluate.max_wait_s
            asyncio.get_running_loop().call_later(limit, self._late, one, limit)
        return False

    async def finish(self) -> None:
        """The last step is done: wait for scores and votes still under way, at most `evaluate.max_wait_s`; drop what is
        late.

        And at most half of train.timeout_s: the trainer's ranks wait for this with that limit (`RankGroup.from_first`).
        """
        limit = min(self._config.evaluate.max_wait_s, self._config.train.timeout_s / 2)
        if self._rounds:
            await asyncio.wait(set(self._rounds), timeout=limit)
            await self._cut_all(
                f"when the last step had waited {limit:g} s for it (evaluate.max_wait_s, at most half of "
                "train.timeout_s)"
            )

    async def close(self) -> None:
        """End what is under way, and the verifiers; what was not through is dropped."""
        await self._cut_all("when the run ended")
        if self._prepared is not None:
            self._prepared.cancel()
            await asyncio.gather(self._prepared, return_exceptions=True)
        self._verifier.close()
        self._flush()

    async def _prepare(self) -> list[EncodedBenchmark]:
        """Read and encode the benchmarks, start the verifiers: while the first step is generated, not in the drain."""
        benchmarks = await asyncio.to_thread(read_benchmarks, self._config)
        encoded = await asyncio.to_thread(encode_benchmarks, self._config, benchmarks, self._service.tokenizer)
        await self._verifier.start()
        return encoded

    async def _run(self, one: _Evaluation) -> None:
        try:
            await self._evaluate(one)
        except (MetronomeError, OSError) as error:  # a full disk, too, ends the evaluation and not the training
            self._drop(one, f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            if not one.cut:
                raise
            self._drop(one, one.cut)
        finally:
            one.generated = one.generated or time.monotonic()
            self._flush()
            await self._notify()

    async def _evaluate(self, one: _Evaluation) -> None:
        assert self._prepared is not None
        todo = [each for each in await asyncio.shield(self._prepared) if not self._known(each, one.version)]
        one.expected = sum(len(each.prompts) for each in todo) * self._config.evaluate.samples
        if not todo:
            return

        async def land(landed: Landed) -> None:
            one.landed += 1
            if one.landed == one.expected:
                one.generated = time.monotonic()
                await self._notify()

        producer = self._producer()
        try:
            async with asyncio.TaskGroup() as tasks:  # the first failure ends the others
                sampling = [tasks.create_task(sample(producer, each.prompts, one.version, land)) for each in todo]
        except ExceptionGroup as failures:
            raise first_leaf(failures) from failures
        for each, groups in zip(todo, [task.result() for task in sampling], strict=True):
            check_version(groups, one.version)
            await self._record(one, each, groups)

    async def _record(self, one: _Evaluation, benchmark: EncodedBenchmark, groups: Sequence[Group]) -> None:
        assert one.generated is not None
        more = {"in_run": True, "seconds": one.generated - one.began, "exposed_s": one.exposed_s}
        subject = Subject(self._config.model.path, one.version)
        row = await record(
            config=self._config,
            folder=self._folder,
            subject=subject,
            benchmark=benchmark,
            groups=groups,
            verifier=self._verifier,
            more=more,
        )
        print(
            f"evaluate: version {one.version}, {row['avg_at_k']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}] on "
            f"{benchmark.name}; took {more['seconds']:.1f} s, of which training waited {more['exposed_s']:.1f} s",
            flush=True,
        )

    def _producer(self) -> Producer:
        settings = self._config.evaluate
        tokenizer = self._service.tokenizer
        stop = tokenizer.stop_ids(self._config.rollout.stop)
        sampling = SamplingSettings(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop_token_ids=stop,
        )
        return Producer(
            pool=self._service.pool,
            verifier=self._verifier,
            decode=tokenizer.decode,
            sampling=sampling,
            group_size=settings.samples,
            seed=self._config.run.seed,
            trace=self._trace,
            deadlines_count=False,
        )  # its responses may be longer than a step's, by config

    def _known(self, benchmark: EncodedBenchmark, version: int) -> bool:
        """Whether the run has evaluated it already: the base model before it began, or a step that is redone."""
        how = protocol(self._config, benchmark.name, benchmark.prompts)
        which = (self._config.model.path, version)
        return any(
            (row.get("model"), row["weight_version"]) == which and not differing(row["protocol"], how)
            for row in read_lines(self._folder.evaluations)
            if "protocol" in row
        )

    def _late(self, one: _Evaluation, limit: float) -> None:
        if one.generated is None:
            self._cut(one, f"when training had waited {limit:g} s for them (evaluate.max_wait_s)")

    def _cut(self, one: _Evaluation, when: str) -> None:
        if one.task is not None and not one.task.done() and not one.cut:
            one.cut = f"{one.how_far} {when}"
            one.task.cancel()

    async def _cut_all(self, when: str) -> None:
        """Cut off what is under way, and wait until it is reported."""
        for one in self._rounds.values():
            self._cut(one, when)
        await asyncio.gather(*self._rounds, return_exceptions=True)

    def _drop(self, one: _Evaluation, reason: str) -> None:
        """Report an evaluation that came to nothing."""
        row = {"weight_version": one.version, "reason": reason, "exposed_s": one.exposed_s}
        path = dropped(self._folder)
        print(f"evaluate: version {one.version} dropped: {reason}; training waited {one.exposed_s:.1f} s", flush=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_line(path, row)
        except OSError as error:
            print(f"evaluate: {path} can't be written: {error}", flush=True)

    def _flush(self) -> None:
        """Write the timeline; without it nothing is lost that training needs."""
        try:
            self._trace.flush()
        except OSError as error:
            print(f"evaluate: the timeline of evaluations can't be written: {error}", flush=True)


def dropped(folder: RunFolder) -> Path:
    """The file with the evaluations that came to nothing: weight_version, reason, exposed_s."""
    return folder.path / "evaluations" / "dropped.jsonl"


def cut(folder: RunFolder, start: int) -> None:
    """Drop what a run evaluated at versions after `start`, from where it is done again: those weights are lost."""
    rows = list(read_lines(folder.evaluations))
    kept = [row for row in rows if not (row.get("in_run") and row["weight_version"] > start)]
    if len(kept) < len(rows):
        write_atomically(folder.evaluations, "".join(json.dumps(row) + "\n" for row in kept))


def check_version(groups: Sequence[Group], version: int) -> None:
    """Raise StaleRolloutError if any token was sampled from other weights than the evaluation is of."""
    for group in groups:
        for number, response in enumerate(group.responses):
            if wrong := {found for _, found in response.versions} - {version}:
                raise StaleRolloutError(
                    f"evaluation of weight version {version}, prompt {group.prompt.id}, response {number} of "
                    f"{response.instance}: sampled from version {min(wrong)}"
                )
