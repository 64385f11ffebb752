"""The launcher's event loop: answers the trainer, runs the producer, keeps the instances on the step's weights."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from engine import errors
from engine.config import Config
from engine.data.loader import PromptLoader
from engine.errors import DeadlineError, MetronomeError
from engine.launcher.batches import Batch, BatchGenerator
from engine.launcher.liveness import Liveness
from engine.launcher.rollout_service import RolloutService
from engine.launcher.run_state import RunState
from engine.launcher.sample_queue import SampleQueue
from engine.launcher.weight_sync.publish_requests import PublishRequests
from engine.run.folder import RunFolder
from engine.run.record import RecordWriter
from engine.run.trace import Trace
from engine.types import StepReport
from engine.wire.codec import group_to_wire, landed_to_wire
from engine.wire.control_server import Handler

if TYPE_CHECKING:
    from engine.launcher.drain_evaluation import DrainEvaluation


class Coordinator:
    """State of the step that is being generated, and the handlers of the control channel."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        trace: Trace,
        loader: PromptLoader | None = None,
        service: RolloutService | None = None,
    ) -> None:
        """Without loader and service (a replay) only ready, heartbeat, replay_progress,
        report and failed are answered."""
        self.config = config
        self.folder = folder
        self.trace = trace
        self.service = service
        self._run_state = RunState()
        self._generator: BatchGenerator | None = None
        if loader is not None and service is not None:
            self._generator = BatchGenerator(config, loader, service, self._run_state.notify)
        self.trainer_error: MetronomeError | None = None
        self.last: dict[str, Any] = {}
        """The last finished step, as in steps.jsonl."""
        self._liveness = Liveness()
        self._is_ready = False
        self._batches: dict[int, Batch] = {}
        self._publishing = PublishRequests(
            config=config,
            service=service,
            trace=trace,
            run_state=self._run_state,
            batches=lambda: list(self._batches.values()),
            allows_publish=self._allows_publish,
        )
        self._recorder: RecordWriter | None = None
        self._replayed_by: dict[int, set[int]] = {}
        self._evaluation = self._drain_evaluation() if service is not None and config.evaluate.every else None

    def handlers(self) -> dict[str, Handler]:
        """By the operation's name; each request is a sign of life of the trainer, at its start and at its end."""
        named = (
            self._ready,
            *self._publishing.handlers(),
            self._start_batch,
            self._lease,
            self._heartbeat,
            self._replay_progress,
            self._report,
            self._failed,
        )
        return {handler.__name__.removeprefix("_"): self._with_sign_of_life(handler) for handler in named}

    def _with_sign_of_life(self, handler: Handler) -> Handler:
        async def heard(request: dict[str, Any]) -> dict[str, Any]:
            with self._liveness.answering(request.get("unit")):
                return await handler(request)

        return heard

    @property
    def failure(self) -> MetronomeError | None:
        """Why the run stops."""
        return self._run_state.failure

    def _allows_publish(self) -> bool:
        return self._evaluation is None or self._evaluation.allows_publish()

    @property
    def is_ready(self) -> bool:
        """Whether the trainer has loaded its models: from then on it hears of a failure and saves what it has."""
        return self._is_ready

    async def fail(self, error: MetronomeError) -> None:
        """Stop the run: the trainer hears of it with its next request, saves a checkpoint and ends."""
        await self._run_state.fail(error)

    async def check(self) -> None:
        """Stop the run when the pool gave up or the trainer is silent;
        raise what is a mistake of ours in the producer."""
        for step, batch in list(self._batches.items()):
            if batch.task is not None and batch.task.done():
                batch.task.result()
                if self.failure is None and not batch.generated:
                    await self.fail(
                        MetronomeError(
                            f"step {step}: its generation ended with {batch.queue.arrived} of "
                            f"{batch.queue.expected} groups, so the trainer would wait for ever"
                        )
                    )
        self._publishing.check()
        if self._evaluation is not None:
            self._evaluation.check()
        if self.failure is None and self.service is not None and self.service.pool.failure is not None:
            await self.fail(self.service.pool.failure)
        limit, keys = self._longest_silence()
        if self.failure is None and (who := self._liveness.longer_than(limit)):
            await self.fail(
                DeadlineError(
                    f"no sign of life of {who} in {limit:g} s ({keys}); its log: {self.folder.logs / 'trainer.log'}"
                )
            )

    def _longest_silence(self) -> tuple[float, str]:
        """In seconds, and the keys that set it. Until it is ready the trainer loads models,
        which instances get time for too."""
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
        from engine.launcher.drain_evaluation import DrainEvaluation  # only the runs that have it pay for its imports

        assert self.service is not None
        return DrainEvaluation(self.config, self.folder, self.service, self._run_state.notify)

    async def _ready(self, request: dict[str, Any]) -> dict[str, Any]:
        """The trainer has loaded its models and goes on from a step;
        the reply names the prompts that it is trained on."""
        self._is_ready = True
        if self._generator is not None:
            self._generator.resume_at(request["start"], request.get("prompt_position"), request.get("prompts"))
        self.folder.cut(request["start"])
        if self._evaluation is not None:
            self._evaluation.begin(request["start"])
        if self.config.train.record and self.service is not None:
            self._recorder = await asyncio.to_thread(
                RecordWriter, self.folder.path / "record.msgpack", self.config, request["start"]
            )
        return {} if self._generator is None else {"prompts": self._generator.fingerprint}

    async def _start_batch(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start generating a step's batch in the background."""
        self._run_state.check()
        step = request["step"]
        assert self._generator is not None
        batch, before = self._generator.begin(step)
        self._batches[step] = batch
        batch.task = asyncio.create_task(self._produce(step, batch, before))
        self._liveness.expect(self.config.parallel.units)
        return {}

    async def _produce(self, step: int, batch: Batch, before: Batch | None) -> None:
        assert self._generator is not None
        await self._publishing.wait_for_swap()
        try:
            await self._generator.fill(step, batch, before)
            if self._evaluation is not None:
                self._evaluation.drained(step)
        except MetronomeError as error:
            await self.fail(error)

    async def _lease(self, request: dict[str, Any]) -> dict[str, Any]:
        """The next window for a unit of the trainer; "end" when all are trained; "wait" as a sign of life."""
        unit = request["unit"]
        if (batch := self._batches.get(request["step"])) is None:
            raise MetronomeError(
                f"unit {unit} of the trainer asked for groups of step {request['step']}, which was not started"
            )
        queue = batch.queue
        queue.acknowledge(request["trained"], unit)
        if queue.done:
            await self._run_state.notify()  # the other units wait for this
        found = await self._run_state.wait_briefly(lambda: self._due(queue, unit, request["budget"]))
        if found.get("end"):
            self._liveness.excuse(unit)
        elif found and self._recorder is not None:
            self._recorder.add(queue.step, unit, found)
        return found or {"wait": f"{queue.arrived} of {queue.expected} groups"}

    async def _heartbeat(self, request: dict[str, Any]) -> dict[str, Any]:
        """The trainer is at work that asks for nothing; it hears of a failure."""
        self._run_state.check()
        return {}

    async def _replay_progress(self, request: dict[str, Any]) -> dict[str, Any]:
        """A unit goes on with its replay; once it is `done` with the step it waits for the others, who may yet fail."""
        self._run_state.check()
        if not request["done"]:
            return {}
        done = self._replayed_by.setdefault(request["step"], set())
        units = self.config.parallel.units
        done.add(request["unit"])
        await self._run_state.notify()
        return await self._run_state.wait_briefly(lambda: {"end": True} if len(done) == units else {})

    def _due(self, queue: SampleQueue, unit: int, budget: int) -> dict[str, Any]:
        """The end of the step, else a window to train, else responses to score early; {} when there is neither."""
        if queue.done:
            return {"end": True}
        self._run_state.check()  # a run that fails gives out nothing more
        if window := queue.lease(unit, budget):
            return {"groups": [group_to_wire(group) for group in window]}
        if landed := queue.early(unit, budget):
            return {"landed": [landed_to_wire(one) for one in landed]}
        return {}

    async def _report(self, request: dict[str, Any]) -> dict[str, Any]:
        """Complete the trainer's figures and append them to steps.jsonl;
        the reply says where the next step's prompts begin."""
        figures = request["figures"]
        step = request["step"]
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
        self.trainer_error = self.trainer_error or getattr(errors, request["error"], MetronomeError)(request["message"])
        await self.fail(self.trainer_error)
        return {}
