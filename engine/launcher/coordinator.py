"""The coordinator: answers the trainer's requests, starts the generation of batches, stops the run if a part fails."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from engine.config import Config
from engine.data.loader import PromptLoader
from engine.errors import DeadlineError, MetronomeError
from engine.launcher.batches import Batch, BatchGenerator
from engine.launcher.batches_in_flight import BatchesInFlight
from engine.launcher.group_store import TransferQueueStore
from engine.launcher.leases import AttemptLeases
from engine.launcher.liveness import Liveness
from engine.launcher.rollout_service import RolloutService
from engine.launcher.run_state import RunState
from engine.launcher.sample_queue import SampleQueue
from engine.launcher.stored_groups import StoredGroups
from engine.launcher.weight_sync.publish_requests import PublishRequests
from engine.run.folder import RunFolder
from engine.run.trace import Trace
from engine.schedule import Schedule
from engine.types import Group, JsonObject, StepReport
from engine.wire import messages
from engine.wire.control_server import Answers
from engine.wire.messages import ControlRequest, Message
from engine.wire.record import FILE, RecordWriter
from engine.wire.sealed import SealedGroup, open_group

if TYPE_CHECKING:
    from engine.launcher.in_run_evaluation import InRunEvaluation


class Coordinator:
    """Holds the state of the steps that are being generated, and answers the trainer's requests."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        trace: Trace,
        loader: PromptLoader | None = None,
        service: RolloutService | None = None,
        store: TransferQueueStore | None = None,
    ) -> None:
        """A replay has no `loader` and no `service`; then only the requests that need no instances are answered.

        `store`: where the bodies of groups lie; None: in the sample queues.
        """
        self.config = config
        self.folder = folder
        self.trace = trace
        self.service = service
        self._run_state = RunState()
        self._generator: BatchGenerator | None = None
        self._publishing: PublishRequests | None = None
        self._schedule = Schedule.of(config.train, config.rollout.partial)
        self._evaluation: InRunEvaluation | None = None
        self.trainer_error: MetronomeError | None = None
        self.last: dict[str, Any] = {}
        """The report of the last finished step, with the keys of steps.jsonl; empty before the first."""
        self._liveness = Liveness()
        self._is_ready = False
        self._batches = BatchesInFlight(self._run_state)
        self._leases = AttemptLeases()
        self._recorder: RecordWriter | None = None
        self._replayed_by: dict[int, set[int]] = {}
        self._stored: StoredGroups | None = None
        self._opening: dict[int, asyncio.Task[None]] = {}
        """By unit: the task that fetches its leased window from the store."""
        self._opened: dict[int, messages.Window] = {}
        """By unit: its leased window, once it has come from the store."""
        if loader is not None and service is not None:
            self._generator = BatchGenerator(config, loader, service, self._run_state.notify)
            if store is not None:
                self._stored = StoredGroups(store, self._generator.generate_again)
                self._generator.keep = self._stored.put
        if service is not None:
            self._evaluation = self._in_run_evaluation(service) if config.evaluate.every else None
            self._publishing = PublishRequests(
                config=config,
                service=service,
                trace=trace,
                run_state=self._run_state,
                batches=self._batches.values,
                allows_publish=self._allows_publish,
                served=self._served,
            )
        self._answers = self.answers()

    def answers(self) -> Answers:
        """The method that answers each type of request. A replay answers no request about instances."""
        always: Answers = {
            messages.Ready: self._ready,
            messages.Heartbeat: self._heartbeat,
            messages.ReplayProgress: self._replay_progress,
            messages.Report: self._report,
            messages.TrainerFailed: self._trainer_failed,
        }
        if (publishing := self._publishing) is None:
            return always
        return {
            **always,
            messages.StartBatch: self._start_batch,
            messages.Lease: self._lease,
            messages.MayPublish: publishing.may_publish,
            messages.OpenSync: publishing.open,
            messages.ConnectSync: publishing.sync.connect,
            messages.SendBucket: publishing.sync.bucket,
            messages.AbortSync: publishing.sync.abort,
            messages.FinishSync: publishing.finish,
            messages.VerifySync: publishing.verify,
        }

    async def answer(self, request: ControlRequest[Any]) -> Message:
        """Return the reply to a request. Its arrival and its reply are both signs of life of the trainer.

        Raises MetronomeError if the run stops, or if a replay gets a request about instances.
        """
        if (method := self._answers.get(type(request))) is None:
            raise MetronomeError(f"{type(request).__name__}: a run that replays a record has no instances")
        with self._liveness.answering(request.unit):
            return await method(request)

    @property
    def failure(self) -> MetronomeError | None:
        """The error that stops the run; None while the run goes on."""
        return self._run_state.failure

    def _allows_publish(self) -> bool:
        return self._evaluation is None or self._evaluation.allows_publish()

    def _served(self, version: int) -> None:
        """All instances hold a version that the trainer has published."""
        if self._evaluation is not None and self._schedule.ahead:
            self._evaluation.evaluate(version)

    @property
    def is_ready(self) -> bool:
        """Whether the trainer has loaded its models. From then on it is told of a failure and saves a checkpoint."""
        return self._is_ready

    async def fail(self, error: MetronomeError) -> None:
        """Stop the run: the trainer gets `error` as the reply to its next request, saves a checkpoint and ends."""
        await self._run_state.fail(error)

    async def check(self) -> None:
        """Stop the run if the pool gave up, the trainer is silent, or a generation ended without all of its groups.

        Raises an exception of a background task that is not a MetronomeError: that is a bug of the launcher.
        """
        await self._batches.check()
        if self._publishing is not None:
            self._publishing.check()
        if self._evaluation is not None:
            self._evaluation.check()
        if self.failure is None and self.service is not None and self.service.pool.failure is not None:
            await self.fail(self.service.pool.failure)
        limit, keys = self._silence_limit()
        if self.failure is None and (who := self._liveness.longer_than(limit)):
            await self.fail(
                DeadlineError(
                    f"no sign of life of {who} in {limit:g} s ({keys}); its log: {self.folder.logs / 'trainer.log'}"
                )
            )

    def how_far(self) -> JsonObject:
        """The progress of the oldest step under way: its groups that have come in, and those that are trained; and of
        an evaluation that is being sampled."""
        found: JsonObject = {"ready": self._is_ready, "done": self.last.get("step", -1) + 1}
        if oldest := self._batches.oldest:
            step, batch = oldest
            queue = batch.queue
            found |= {"step": step, "arrived": queue.arrived, "trained": queue.trained, "expected": queue.expected}
        if self._evaluation is not None and (under_way := self._evaluation.under_way) is not None:
            found["evaluation"] = under_way
        return found

    def _silence_limit(self) -> tuple[float, str]:
        """The longest time in seconds that the trainer may be silent, and the keys that set it.

        Until the trainer is ready it loads models, so the time that instances get for that is added.
        """
        limit = self.config.train.timeout_s
        if self._is_ready:
            return limit, "train.timeout_s"
        return limit + self.config.rollout.timeout_s, "train.timeout_s + rollout.timeout_s"

    async def close(self) -> None:
        """Cancel the batches under way, the publishing and the evaluation, and write the timeline."""
        for task in self._opening.values():
            task.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        await self._batches.close()
        if self._stored is not None:
            await self._stored.close()
        if self._publishing is not None:
            await self._publishing.close()
        if self._evaluation is not None:
            await self._evaluation.close()
        self.trace.flush()

    def _in_run_evaluation(self, service: RolloutService) -> InRunEvaluation:
        from engine.launcher.in_run_evaluation import InRunEvaluation  # only the runs that have it pay for its imports

        return InRunEvaluation(self.config, self.folder, service, self._run_state.notify)

    async def _ready(self, request: messages.Ready) -> messages.Prompts:
        """The trainer has loaded its models and begins with step `start`; the reply is the fingerprint of the run's
        prompts."""
        self._is_ready = True
        if self._generator is not None:
            self._generator.resume_at(request.start, request.prompt_position, request.prompts)
        self.folder.cut(request.start)
        if self._evaluation is not None:
            self._evaluation.begin(request.start)
        if self.config.train.record and self.service is not None:
            self._recorder = await asyncio.to_thread(RecordWriter, self.folder.path / FILE, self.config, request.start)
        return messages.Prompts(None if self._generator is None else self._generator.fingerprint)

    async def _start_batch(self, request: messages.StartBatch) -> messages.Done:
        """Start generating a step's batch in the background."""
        self._run_state.check()
        step = request.step
        assert self._generator is not None
        batch, before = self._generator.begin(step)
        self._batches.start(step, batch, self._generate_batch(step, batch, before))
        self._liveness.expect(self.config.parallel.units)
        return messages.Done()

    async def _generate_batch(self, step: int, batch: Batch, before: Batch | None) -> None:
        assert self._generator is not None
        assert self._publishing is not None
        await self._publishing.wait_for_swap()
        await self._generator.fill(step, batch, before)
        if self._evaluation is not None and not self._schedule.ahead:
            self._evaluation.evaluate(step)

    async def _lease(self, request: messages.Lease) -> messages.Work:
        """Acknowledge what a unit has trained, and reply with what it does next."""
        unit = request.unit
        assert unit is not None
        if (batch := self._batches.get(request.step)) is None:
            raise MetronomeError(
                f"unit {unit} of the trainer asked for groups of step {request.step}, which was not started"
            )
        queue = batch.queue
        trained = self._leases.acknowledge(request)
        if self._stored is not None:
            self._stored.trained(trained)
        if request.unfetched is not None:
            self._begin_to_open(unit, self._leases.window(request.unfetched))
        if queue.done:
            await self._run_state.notify()  # the other units wait for the end of the step
        found: messages.Work | None = await self._run_state.wait_briefly(partial(self._next_work, queue, unit, request))
        if isinstance(found, messages.EndOfStep):
            self._liveness.excuse(unit)
        elif isinstance(found, (messages.Window, messages.EarlyWork)) and self._recorder is not None:
            self._recorder.add(queue.step, unit, found)
        if found is None:
            return messages.StillWaiting()
        return found

    def _next_work(self, queue: SampleQueue, unit: int, request: messages.Lease) -> messages.Work | None:
        """Return the end of the step, else a window to train, else responses to score early, else None."""
        if queue.done:
            return messages.EndOfStep()
        self._run_state.check()  # a run that stops leases nothing more
        if unit in self._opened:
            return self._opened.pop(unit)
        if unit in self._opening:
            return None
        if window := self._leases.give(queue, request):
            return self._given(unit, window, request.fetches)
        if landed := queue.early(unit, request.budget):
            return messages.EarlyWork(tuple(landed))
        return None

    def _given(self, unit: int, window: messages.Window, fetches: bool) -> messages.Window | None:
        """Return a leased window for the unit; None if the launcher must fetch its bodies first."""
        if self._stored is None:
            return window
        if fetches and self._recorder is None and (store := self._stored.where(window.groups)) is not None:
            return replace(window, store=store)
        self._begin_to_open(unit, window)
        return None

    def _begin_to_open(self, unit: int, window: messages.Window) -> None:
        assert self._stored is not None
        self._opening[unit] = asyncio.create_task(self._open(self._stored, unit, window))

    async def _open(self, stored: StoredGroups, unit: int, window: messages.Window) -> None:
        """Fetch the bodies of a leased window, and wake the unit's request."""
        try:
            self._opened[unit] = replace(window, groups=tuple(await stored.open(window.groups)))
        except MetronomeError as error:
            await self.fail(error)
        del self._opening[unit]
        await self._run_state.notify()

    async def _heartbeat(self, request: messages.Heartbeat) -> messages.Done:
        """The trainer is busy with work that needs no other request; the reply may be the error that stops the run."""
        self._run_state.check()
        return messages.Done()

    async def _replay_progress(self, request: messages.ReplayProgress) -> messages.EndOfStep | messages.StillWaiting:
        """A unit goes on with its replay. Once it is `done` with a step it waits for the others, which may fail."""
        self._run_state.check()
        if not request.done:
            return messages.StillWaiting()
        done = self._replayed_by.setdefault(request.step, set())
        units = self.config.parallel.units
        assert request.unit is not None
        done.add(request.unit)
        await self._run_state.notify()
        end = await self._run_state.wait_briefly(lambda: messages.EndOfStep() if len(done) == units else None)
        return end or messages.StillWaiting()

    async def _report(self, request: messages.Report) -> messages.Reported:
        """Complete the trainer's figures and append them to steps.jsonl; the reply is the position of the next step's
        prompts."""
        figures = request.figures
        step = request.step
        batch = self._batches.pop(step)
        if self._stored is not None:
            await self._stored.clear(step)
        pool_size = self.service.pool.size if self.service is not None else 0
        devices = self.config.parallel.ranks + pool_size * self.config.rollout.tensor
        report = StepReport(
            step=step,
            weight_version=step,
            pool_size=pool_size,
            rollout_s=batch.rollout_s if batch is not None else 0.0,
            reward_tried=batch.reward_tried if batch is not None else None,
            prompts_used=batch.prompts_used if batch is not None else None,
            tokens_per_s_per_device=figures["trained_tokens"] / figures["step_s"] / devices,
            **figures,
        )
        self.folder.add_step(report)
        self.last = dataclasses.asdict(report)
        self.folder.add_samples(step, await self._texts(batch.samples if batch is not None else []))
        if self._evaluation is not None and step == self.config.train.steps - 1:
            await self._evaluation.finish()
        if self._recorder is not None:
            self._recorder.flush()
        self.trace.flush()
        return messages.Reported(batch.next_position if batch is not None else None)

    async def _texts(self, groups: Sequence[SealedGroup]) -> list[Group]:
        """Return the groups with the responses' texts. They are decoded in a thread, because that takes long."""
        if self.service is None:
            return []
        decode = self.service.tokenizer.decode
        return await asyncio.to_thread(lambda: [open_group(group, decode=decode) for group in groups])

    async def _trainer_failed(self, request: messages.TrainerFailed) -> messages.Done:
        """Stop the run with the error of a unit that ends. The next request of each other unit is answered with it."""
        self.trainer_error = self.trainer_error or request.error.error()
        await self.fail(self.trainer_error)
        return messages.Done()
