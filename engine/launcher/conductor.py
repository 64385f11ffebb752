"""The launcher's event loop: answers the trainer, runs the producer, keeps the instances on the step's weights."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from engine import errors
from engine.config import Config
from engine.data.loader import PromptLoader
from engine.errors import DeadlineError, MetronomeError
from engine.launcher.batch import Batch
from engine.launcher.course import Course
from engine.launcher.generation import Generation
from engine.launcher.service import Service
from engine.launcher.silence import Silence
from engine.launcher.store import SampleQueue
from engine.launcher.weight_sync.publishing import Publishing
from engine.run.record import Recorder
from engine.run.run_folder import RunFolder
from engine.run.trace import Trace
from engine.types import StepReport
from engine.wire.codec import group_to_wire, landed_to_wire
from engine.wire.server import Handler

if TYPE_CHECKING:
    from engine.launcher.drain import DrainEvaluation


class Conductor:
    """State of the step that is being generated, and the handlers of the control channel."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        trace: Trace,
        loader: PromptLoader | None = None,
        service: Service | None = None,
    ) -> None:
        """Without loader and service (a replay) only ready, replayed, report and failed are answered."""
        self.config = config
        self.folder = folder
        self.trace = trace
        self.service = service
        self._course = Course()
        self._generation: Generation | None = None
        if loader is not None and service is not None:
            self._generation = Generation(config, loader, service, self._course.notify)
        self.told: MetronomeError | None = None
        self.last: dict[str, Any] = {}
        """The last finished step, as in steps.jsonl."""
        self._silence = Silence()
        self._is_ready = False
        self._batches: dict[int, Batch] = {}
        self._publishing = Publishing(config, service, trace, self._course, lambda: list(self._batches.values()), self._may_move)
        self._recorder: Recorder | None = None
        self._replayed_by: dict[int, set[int]] = {}
        self._evaluation = self._drain_evaluation() if service is not None and config.evaluate.every else None

    def handlers(self) -> dict[str, Handler]:
        """By the operation's name; each request is a sign of life of the trainer, at its start and at its end."""
        named = (self._ready, *self._publishing.handlers(), self._start, self._lease, self._alive, self._replayed, self._report,
                 self._failed)
        return {handler.__name__.removeprefix("_"): self._hearing(handler) for handler in named}

    def _hearing(self, handler: Handler) -> Handler:
        async def heard(request: dict[str, Any]) -> dict[str, Any]:
            with self._silence.answering(request.get("unit")):
                return await handler(request)

        return heard

    @property
    def failure(self) -> MetronomeError | None:
        """Why the run stops."""
        return self._course.failure

    def _may_move(self) -> bool:
        return self._evaluation is None or self._evaluation.may_move()

    @property
    def is_ready(self) -> bool:
        """Whether the trainer has loaded its models: from then on it hears of a failure and saves what it has."""
        return self._is_ready

    async def fail(self, error: MetronomeError) -> None:
        """Stop the run: the trainer hears of it with its next request, saves a checkpoint and ends."""
        await self._course.fail(error)

    async def check(self) -> None:
        """Stop the run when the pool gave up or the trainer is silent; raise what is a mistake of ours in the producer."""
        for step, batch in list(self._batches.items()):
            if batch.task is not None and batch.task.done():
                batch.task.result()
                if self.failure is None and not batch.generated:
                    await self.fail(MetronomeError(f"step {step}: its generation ended with {batch.queue.arrived} of "
                                                   f"{batch.queue.expected} groups, so the trainer would wait for ever"))
        self._publishing.check()
        if self._evaluation is not None:
            self._evaluation.check()
        if self.failure is None and self.service is not None and self.service.pool.failure is not None:
            await self.fail(self.service.pool.failure)
        limit, keys = self._longest_silence()
        if self.failure is None and (who := self._silence.longer_than(limit)):
            await self.fail(DeadlineError(f"no sign of life of {who} in {limit:g} s ({keys}); its log: "
                                          f"{self.folder.logs / 'trainer.log'}"))

    def _longest_silence(self) -> tuple[float, str]:
        """In seconds, and the keys that set it. Until it is ready the trainer loads models, which instances get time for too."""
        limit = self.config.train.timeout_s
        if self._is_ready:
            return limit, "train.timeout_s"
        return limit + self.config.rollout.timeout_s, "train.timeout_s + rollout.timeout_s"

    async def close(self) -> None:
        """Cancel the batches under way."""
        tasks = [batch.task for batch in self._batches.values() if batch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._publishing.close()
        if self._evaluation is not None:
            await self._evaluation.close()
        self.trace.flush()

    def _drain_evaluation(self) -> DrainEvaluation:
        from engine.launcher.drain import DrainEvaluation  # only the runs that have it pay for its imports

        assert self.service is not None
        return DrainEvaluation(self.config, self.folder, self.service, self._course.notify)

    async def _ready(self, request: dict[str, Any]) -> dict[str, Any]:
        """The trainer has loaded its models and goes on from a step; the reply names the prompts that it is trained on."""
        self._is_ready = True
        if self._generation is not None:
            self._generation.go_on(request["start"], request.get("prompt_position"), request.get("prompts"))
        self.folder.cut(request["start"])
        if self._evaluation is not None:
            self._evaluation.begin(request["start"])
        if self.config.train.record and self.service is not None:
            self._recorder = await asyncio.to_thread(Recorder, self.folder.path / "record.msgpack", self.config, request["start"])
        return {} if self._generation is None else {"prompts": self._generation.fingerprint}

    async def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start generating a step's batch in the background."""
        self._course.check()
        step = request["step"]
        assert self._generation is not None
        batch, before = self._generation.begin(step)
        self._batches[step] = batch
        batch.task = asyncio.create_task(self._produce(step, batch, before))
        self._silence.expect(self.config.parallel.units)
        return {}

    async def _produce(self, step: int, batch: Batch, before: Batch | None) -> None:
        assert self._generation is not None
        await self._publishing.swapped()
        try:
            await self._generation.fill(step, batch, before)
            if self._evaluation is not None:
                self._evaluation.drained(step)
        except MetronomeError as error:
            await self.fail(error)

    async def _lease(self, request: dict[str, Any]) -> dict[str, Any]:
        """The next window for a unit of the trainer; "end" when all are trained; "wait" as a sign of life."""
        unit = request["unit"]
        if (batch := self._batches.get(request["step"])) is None:
            raise MetronomeError(f"unit {unit} of the trainer asked for groups of step {request['step']}, which was not started")
        queue = batch.queue
        queue.acknowledge(request["trained"], unit)
        if queue.done:
            await self._course.notify()  # the other units wait for this
        found = await self._course.soon(lambda: self._due(queue, unit, request["budget"]))
        if found.get("end"):
            self._silence.excuse(unit)
        elif found and self._recorder is not None:
            self._recorder.add(queue.step, unit, found)
        return found or {"wait": f"{queue.arrived} of {queue.expected} groups"}

    async def _alive(self, request: dict[str, Any]) -> dict[str, Any]:
        """The trainer is at work that asks for nothing; it hears of a failure."""
        self._course.check()
        return {}

    async def _replayed(self, request: dict[str, Any]) -> dict[str, Any]:
        """A unit goes on with its replay; once it is `done` with the step it waits for the others, who may yet fail."""
        self._course.check()
        if not request["done"]:
            return {}
        done, units = self._replayed_by.setdefault(request["step"], set()), self.config.parallel.units
        done.add(request["unit"])
        await self._course.notify()
        return await self._course.soon(lambda: {"end": True} if len(done) == units else {})

    def _due(self, queue: SampleQueue, unit: int, budget: int) -> dict[str, Any]:
        """The end of the step, else a window to train, else responses to score early; {} when there is neither."""
        if queue.done:
            return {"end": True}
        self._course.check()  # a run that fails gives out nothing more
        if window := queue.lease(unit, budget):
            return {"groups": [group_to_wire(group) for group in window]}
        if landed := queue.early(unit, budget):
            return {"landed": [landed_to_wire(one) for one in landed]}
        return {}

    async def _report(self, request: dict[str, Any]) -> dict[str, Any]:
        """Complete the trainer's figures and append them to steps.jsonl; the reply says where the next step's prompts begin."""
        figures, step = request["figures"], request["step"]
        batch = self._batches.pop(step, None)
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
        self.folder.add_samples(step, batch.samples if batch is not None else [])
        if self._evaluation is not None and step == self.config.train.steps - 1:
            await self._evaluation.finish()
        if self._recorder is not None:
            self._recorder.flush()
        self.trace.flush()
        return {"prompt_position": batch.next_position if batch is not None else None}

    async def _failed(self, request: dict[str, Any]) -> dict[str, Any]:
        """A unit of the trainer ends with this error; the others hear of it with their next request."""
        self.told = self.told or getattr(errors, request["error"], MetronomeError)(request["message"])
        await self.fail(self.told)
        return {}
