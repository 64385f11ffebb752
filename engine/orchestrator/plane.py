"""The plane answers requests, starts the generation of batches, and stops the run if a part fails."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.algorithm.alignment import WARM_UP, upper_end
from engine.config import Config
from engine.config.placing import count_devices
from engine.data.loader import PromptLoader
from engine.errors import DeadlineError, MetronomeError, RewardError, ServiceConflict
from engine.model.shape import read_shape
from engine.orchestrator.batches import Batches
from engine.orchestrator.column_store import ColumnStore
from engine.orchestrator.leases import Leases
from engine.orchestrator.publish.probe import make_probe
from engine.orchestrator.publish.publishes import Publishes
from engine.orchestrator.rollout_service import RolloutService
from engine.orchestrator.run_state import RunState
from engine.orchestrator.stages import stages_of
from engine.orchestrator.steps import Steps
from engine.run.divergence import Divergence
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.run.trace import Trace
from engine.schedule import Schedule
from engine.types import Group, JsonObject, StepReport
from engine.wire import messages
from engine.wire.columns import open_group
from engine.wire.messages import TRAIN, EndOfStep, Message, Request, StillWaiting

if TYPE_CHECKING:
    from engine.orchestrator.in_run_evaluation import InRunEvaluation

Answers = Mapping[type[Request[Any]], Callable[[Any], Awaitable[Message]]]
"""The method that answers each type of request."""


class Plane:
    """Holds the steps in progress and answers every request: from our trainer and scorers, and from external programs.

    Within a step, every row is trained once. Our trainer holds its leases until it dies, which ends the attempt. Leases
    of external programs have a deadline.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        trace: Trace,
        loader: PromptLoader | None = None,
        service: RolloutService | None = None,
        store: ColumnStore | None = None,
        weights: Path | None = None,
        trains: bool = True,
    ) -> None:
        """Without `loader` and `service` (a replay), only requests that need no instances are answered.

        `store`: where the bodies of columns are kept; None: the orchestrator's memory. `weights`: folder for weights on
        their way to the instances. `trains`: whether the run has its own trainer, rather than an external program.
        """
        self.config = config
        self.folder = folder
        self.trace = trace
        self.service = service
        self._weights = weights or folder.path
        self._trains = trains
        self._run_state = RunState()
        self._schedule = Schedule.of(config.train, config.rollout.partial)
        self.steps = Steps(stages_of(config, None if trains else config.train.timeout_s), store)
        self.trainer_error: MetronomeError | None = None
        self._divergence = Divergence()
        self.last: dict[str, Any] = {}
        """The report of the last finished step, with the keys of steps.jsonl; empty before the first."""
        self._is_ready = False
        self._replayed_by: dict[int, set[int]] = {}
        self._evaluation: InRunEvaluation | None = None
        self.publishes: Publishes | None = None
        """The publishes of weights; None in a replay."""
        self._batches: Batches | None = None
        if service is not None and loader is not None:
            self._evaluation = self._make_evaluation(service)
            self.publishes = self._make_publishes(service, loader)
        self.leases = Leases(
            config=config,
            run_state=self._run_state,
            steps=self.steps,
            folder=folder,
            publishes=self.publishes,
        )
        if service is not None and loader is not None and self.publishes is not None:
            self._batches = Batches(
                config=config,
                loader=loader,
                service=service,
                run_state=self._run_state,
                steps=self.steps,
                publishes=self.publishes,
                leases=self.leases,
                evaluation=self._evaluation,
                trains=trains,
            )
        self._answers = self.answers()

    def _make_evaluation(self, service: RolloutService) -> InRunEvaluation | None:
        if not self.config.evaluate.every:
            return None
        from engine.orchestrator.in_run_evaluation import InRunEvaluation  # only runs that have it pay for its imports

        return InRunEvaluation(self.config, self.folder, service, self._run_state.notify)

    def _make_publishes(self, service: RolloutService, loader: PromptLoader) -> Publishes:
        config = self.config
        probe = make_probe(
            vocabulary=read_shape(Path(config.model.path)).vocabulary,
            count=config.weights.check_tokens,
            max_context=config.rollout.max_context,
            dtype=config.compared_dtype,
            text=loader.tokens(),
            recorded=next(iter(self.folder.first_figures("sync_difference")), 0.0),
        )
        return Publishes(
            config=config,
            pool=service.pool,
            probe=probe,
            steps=self.steps,
            run_state=self._run_state,
            trace=self.trace,
            allows_publish=self._evaluation.allows_publish if self._evaluation is not None else lambda serves: True,
            on_verified=self._begin_version,
            trains=self._trains,
        )

    def answers(self) -> Answers:
        """Return the method that answers each type of request. A replay answers no request about instances."""
        always: Answers = {
            messages.Ready: self._ready,
            messages.Heartbeat: self._heartbeat,
            messages.ReplayProgress: self._replay_progress,
            messages.Report: self._report,
            messages.StageFailed: self._stage_failed,
        }
        publishes = self.publishes
        batches = self._batches
        if publishes is None or batches is None:
            return always
        return {
            **always,
            messages.InitEngines: self._init_engines,
            messages.PutPrompts: batches.put_prompts,
            messages.SampleResponses: batches.sample_responses,
            messages.Lease: self.leases.lease_window,
            messages.WriteColumns: self.leases.write_columns,
            messages.AwaitVersion: publishes.await_version,
            messages.MayPublish: publishes.may_publish,
            messages.OpenSync: publishes.open,
            messages.ConnectSync: publishes.connect,
            messages.SendBucket: publishes.send,
            messages.AbortSync: publishes.abort,
            messages.FinishSync: publishes.finish,
            messages.VerifySync: publishes.verify,
        }

    async def answer(self, request: Request[Any], ours: bool = True) -> Message:
        """Return the reply to a request. `ours`: whether one of the run's own ranks sent it. A trainer's request, and
        the reply to it, count as signs of life.

        Raises MetronomeError if the run stops, or if a replay gets a request about instances. Raises ServiceConflict if
        an external program asks for something that only the run's own trainer may do, and BadInput if the request, or
        one of its fields, is for the run's own ranks only.
        """
        if (method := self._answers.get(type(request))) is None:
            raise MetronomeError(f"{type(request).__name__}: a run that replays a record has no instances")
        of_trainer = messages.is_of_trainer(request)
        if of_trainer and self._trains and not ours:
            raise ServiceConflict(
                f"{type(request).__name__}: the run has its own trainer, and only that trainer advances its steps and "
                "weights; lease rows for your own stage, or start a service (docs/service.md)"
            )
        if not ours:
            messages.check_program(request, self.steps.replica_groups, self.config.train.prompts_per_step)
        if not of_trainer:
            return await method(request)
        with self.leases.answering(request.replica_group):
            return await method(request)

    # the run --------------------------------------------------------------------------------------

    @property
    def failure(self) -> MetronomeError | None:
        """The error that stops the run; None while the run goes on."""
        return self._run_state.failure

    @property
    def is_ready(self) -> bool:
        """Whether the trainer has loaded its models. From then on it is told of a failure, and saves a checkpoint."""
        return self._is_ready

    @property
    def is_over(self) -> bool:
        """Whether the last step is trained, so that no stage has work left."""
        return self.leases.is_over

    async def stop_run(self, error: MetronomeError) -> None:
        """Stop the run: the trainer gets `error` as the reply to its next request, saves a checkpoint and ends."""
        await self._run_state.stop_run(error)

    async def check_run(self) -> None:
        """Stop the run if the pool has given up, the trainer is silent, rows wait too long for a stage, or generation
        ended with groups missing.

        Raises any exception of a background task that is not a MetronomeError: it is a bug in the orchestrator.
        """
        if self._batches is not None:
            await self._batches.check_generation()
        if self.publishes is not None:
            self.publishes.check_swap()
        if self._evaluation is not None:
            self._evaluation.check_evaluations()
        if self.failure is None and self.service is not None and self.service.pool.failure is not None:
            await self.stop_run(self.service.pool.failure)
        if self.failure is None and (late := self.leases.late_stage(time.monotonic())):
            await self.stop_run(DeadlineError(late))
        limit, keys = self._silence_limit()
        if self._trains and self.failure is None and (who := self.leases.silent_longer_than(limit)):
            await self.stop_run(
                DeadlineError(
                    f"no sign of life from {who} in {limit:g} s ({keys}); its log: {self.folder.logs / 'trainer.log'}"
                )
            )

    def _silence_limit(self) -> tuple[float, str]:
        """Return the longest time in seconds that the trainer may be silent, and the keys that set it. Before the
        trainer is ready it loads models, so the time that instances get for loading is added."""
        limit = self.config.train.timeout_s
        if self._is_ready:
            return limit, "train.timeout_s"
        return limit + self.config.rollout.timeout_s, "train.timeout_s + rollout.timeout_s"

    def stage_progress(self) -> JsonObject:
        """Return the progress of the oldest step (how many of its groups have arrived and how many are trained), and of
        an evaluation that is being sampled."""
        found: JsonObject = {"ready": self._is_ready, "done": self.last.get("step", -1) + 1}
        if step := self.steps.oldest:
            counted = {"arrived": step.arrived, "trained": step.trained, "expected": step.expected}
            found |= {"step": step.number, **counted}
        if self._evaluation is not None and (under_way := self._evaluation.under_way) is not None:
            found["evaluation"] = under_way
        return found

    def status(self) -> JsonObject:
        """Return the part of GET /status about the steps in progress."""
        return {
            "ready": self._is_ready,
            "version": self._verified,
            "steps": self.steps.numbers,
            "arrived": [step.arrived for step in self.steps.values()],
            "held_bytes": self._batches.held_bytes if self._batches is not None else 0,
            "stages": self.leases.status(),
        }

    @property
    def _verified(self) -> int | None:
        return self.publishes.verified if self.publishes is not None else None

    async def close(self) -> None:
        """Cancel the batches in progress, the publishing and the evaluation, and write the timeline."""
        if self._batches is not None:
            await self._batches.close()
        if self.publishes is not None:
            await self.publishes.close()
        if self._evaluation is not None:
            await self._evaluation.close()
        self.trace.flush()

    async def _ready(self, request: messages.Ready) -> messages.Prompts:
        """Note that the trainer has loaded its models and begins with step `start`. Reply with the fingerprint of the
        run's prompts."""
        self._is_ready = True
        for text in request.notices:
            self.folder.add_notice("resume", text)
        if self._batches is not None:
            self.steps.begin_run(request.replica_groups)
            if self._trains or self.publishes is None or self.publishes.version is None:
                self._batches.resume_at(request.start, request.prompt_position, request.prompts)
        if self._trains:
            self.folder.cut_steps(request.start)
            if self.service is not None and request.start:
                rollout = self.config.rollout
                self.service.notices.count_steps(
                    steps=list(read_lines(self.folder.steps)),
                    groups=self.config.train.prompts_per_step,
                    size=rollout.group_size,
                    max_new_tokens=rollout.max_new_tokens,
                )
        if self._evaluation is not None:
            self._evaluation.begin_run(request.start)
        await self.leases.begin_run(request.start)
        return messages.Prompts(None if self._batches is None else self._batches.fingerprint)

    async def _init_engines(self, request: messages.InitEngines) -> messages.Engines:
        """Tell a program the recipe, the folder for weights, and the version that the instances hold."""
        return messages.Engines(self.config.model_dump_json(), str(self._weights), self._verified)

    async def _heartbeat(self, request: messages.Heartbeat) -> messages.Done:
        """Answer a trainer that is busy with work that needs no other request. Raises the error that stops the run, if
        any."""
        self._run_state.check_failure()
        return messages.Done()

    async def _stage_failed(self, request: messages.StageFailed) -> messages.Done:
        """Stop the run with the error of a stage that has failed. Every other stage gets this error as its next
        reply."""
        error = request.error.error()
        if request.stage == TRAIN and not self._trains:
            return messages.Done()  # an external trainer may restart
        if request.stage == TRAIN:
            self.trainer_error = self.trainer_error or error
        await self.stop_run(error)
        return messages.Done()

    # steps ----------------------------------------------------------------------------------------

    def _begin_version(self, version: int) -> None:
        """Handle that all instances hold a version that the trainer has published: the steps before it are over."""
        if self._evaluation is not None and self._schedule.ahead:
            self._evaluation.evaluate_version(version)
        for number in self.steps.numbers:
            if number < version:
                self.steps.end(number)

    async def _report(self, request: messages.Report) -> messages.Done:
        """Complete the trainer's metrics and append them to steps.jsonl."""
        figures = request.figures
        step = request.step
        ended = self.steps.end(step)
        pool_size = self.service.pool.size if self.service is not None else 0
        devices = count_devices(self.config, pool_size)
        report = StepReport(
            step=step,
            weight_version=step,
            pool_size=pool_size,
            rollout_s=ended.rollout_s if ended is not None else 0.0,
            reward_tried=ended.reward_tried if ended is not None else None,
            prompts_used=ended.prompts_used if ended is not None else None,
            sync_difference=self.publishes.difference if self.publishes is not None else None,
            tokens_per_s_per_device=figures["trained_tokens"] / figures["step_s"] / devices,
            **figures,
        )
        self.folder.add_step(report)
        self.last = dataclasses.asdict(report)
        if self._divergence.add(self.last) and self.service is not None:
            self.service.notices.happened("warning", "divergence", self._divergence.describe())
        if step == 0 and report.reward_timeouts == self.config.train.prompts_per_step * self.config.rollout.group_size:
            limit = self.config.reward.timeout_s
            message = (
                f"all {report.reward_timeouts:,} scores of the first step timed out (reward.timeout_s = {limit:g}), so "
                f"it taught nothing: mend {self.config.reward.label}, or raise reward.timeout_s or reward.workers; "
                "metronome try-reward shows the seconds of a call"
            )
            await self.stop_run(RewardError(message))
        if self.service is not None and report.grad_cosine is not None:
            low = self.config.algorithm.gac_low
            seen = self.folder.first_figures("grad_cosine", WARM_UP) if low == "auto" else []
            self.service.notices.add_cosine(step, report.grad_cosine, upper_end(low, seen))
        tokenizer = self.service.tokenizer if self.service is not None else None
        samples: list[Group] = []
        if ended is not None and tokenizer is not None:  # decoding takes long
            decoded = partial(open_group, decode=tokenizer.decode)
            samples = await asyncio.to_thread(lambda: list(map(decoded, ended.samples)))
        self.folder.add_samples(
            step,
            samples,
            decode=None if tokenizer is None else tokenizer.decode,
            pieces=None if tokenizer is None else tokenizer.pieces,
            advantages=request.advantages,
        )
        if self._evaluation is not None and step == self.config.train.steps - 1:
            await self._evaluation.finish_evaluations()
        self.leases.flush_record()
        self.trace.flush()
        return messages.Done()

    async def _replay_progress(self, request: messages.ReplayProgress) -> EndOfStep | StillWaiting:
        """Record that a replica group goes on with its replay. A replica group that is `done` with a step waits for the
        others."""
        self._run_state.check_failure()
        if not request.done:
            return StillWaiting()
        done = self._replayed_by.setdefault(request.step, set())
        replica_groups = self.config.parallel.replica_groups
        assert request.replica_group is not None
        done.add(request.replica_group)
        await self._run_state.notify()
        return (
            await self._run_state.wait_briefly(lambda: EndOfStep() if len(done) == replica_groups else None)
            or StillWaiting()
        )
