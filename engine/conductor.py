"""The launcher's event loop: answers the trainer, runs the producer, keeps the instances on the step's weights."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from engine import errors
from engine.config import Config
from engine.data.loader import PromptLoader
from engine.errors import DeadlineError, MetronomeError
from engine.queue.codec import group_to_wire
from engine.queue.server import Handler
from engine.queue.store import SampleQueue
from engine.rollout.service import Service
from engine.run_folder import SAMPLED_GROUPS, RunFolder
from engine.trace import Trace
from engine.types import Group, StepReport

SIGN_OF_LIFE_S = 1.0
"""A rank that waits for a group hears from the launcher this often."""


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
        """Without loader and service (a replay) only ready, report and failed are answered."""
        self.config = config
        self.folder = folder
        self.trace = trace
        self.loader = loader
        self.service = service
        self.failure: MetronomeError | None = None
        self.told: MetronomeError | None = None
        self._heard = time.monotonic()
        self._queue: SampleQueue | None = None
        self._batch: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._rollout_s = 0.0
        self._samples: list[Group] = []

    def handlers(self) -> dict[str, Handler]:
        """By the operation's name; each request is a sign of life of the trainer, at its start and at its end."""
        named = (self._ready, self._publish, self._start, self._lease, self._report, self._failed)
        return {handler.__name__.removeprefix("_"): self._hearing(handler) for handler in named}

    def _hearing(self, handler: Handler) -> Handler:
        async def heard(request: dict[str, Any]) -> dict[str, Any]:
            self._heard = time.monotonic()
            try:
                return await handler(request)
            finally:
                self._heard = time.monotonic()

        return heard

    async def fail(self, error: MetronomeError) -> None:
        """Stop the run: the trainer hears of it with its next request, saves a checkpoint and ends."""
        self.failure = self.failure or error
        async with self._changed:
            self._changed.notify_all()

    async def check(self) -> None:
        """Stop the run when no instance is left or the trainer is silent; raise what is a mistake of ours in the producer."""
        if self._batch is not None and self._batch.done():
            self._batch.result()
        if self.failure is None and self.service is not None and self.service.pool.size == 0:
            await self.fail(await asyncio.to_thread(self.service.pool.all_gone))
        limit = self.config.train.timeout_s
        if self.failure is None and time.monotonic() - self._heard > limit:
            await self.fail(DeadlineError(f"no sign of life of the trainer in {limit:.0f} s (train.timeout_s); its log: "
                                          f"{self.folder.logs / 'trainer.log'}"))

    async def close(self) -> None:
        """Cancel the batch under way."""
        if self._batch is not None:
            self._batch.cancel()
            await asyncio.gather(self._batch, return_exceptions=True)
        self.trace.flush()

    async def _ready(self, request: dict[str, Any]) -> dict[str, Any]:
        self.folder.cut(request["start"])
        return {}

    async def _publish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Every instance gets exactly this version, or the run fails by name."""
        self._check()
        assert self.service is not None
        started = time.time()
        await self.service.pool.publish(request["version"], request["info"])
        self.trace.add("sync", started, time.time(), lane="instances", step=request["version"])
        return {}

    async def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start generating the step's batch in the background."""
        self._check()
        train = self.config.train
        self._samples = []
        self._queue = SampleQueue(
            request["step"], train.prompts_per_step, train.consume, hold=train.mode == "sync"
        )
        self._batch = asyncio.create_task(self._produce(request["step"], self._queue))
        return {}

    async def _produce(self, step: int, queue: SampleQueue) -> None:
        assert self.loader is not None
        assert self.service is not None
        started = time.perf_counter()
        prompts = [(self.loader.epoch_of(step, i), prompt) for i, prompt in enumerate(self.loader.batch(step))]

        async def put(group: Group) -> None:
            queue.put(group)
            if len(self._samples) < SAMPLED_GROUPS:
                self._samples.append(group)
            self._rollout_s = time.perf_counter() - started
            async with self._changed:
                self._changed.notify_all()

        try:
            await self.service.producer.run(step, prompts, put)
        except MetronomeError as error:
            await self.fail(error)

    async def _lease(self, request: dict[str, Any]) -> dict[str, Any]:
        """The next window of groups for a replica; "end" when all are trained; "wait" as a sign of life."""
        queue = self._queue
        if queue is None or queue.step != request["step"]:
            raise MetronomeError(f"{request['replica']} asked for groups of step {request['step']}, which was not started")
        queue.acknowledge(request["trained"], request["replica"])
        deadline = time.monotonic() + SIGN_OF_LIFE_S
        async with self._changed:
            while True:
                if queue.done:
                    return {"end": True}
                self._check()
                if window := queue.lease(request["replica"], request["budget"]):
                    return {"groups": [group_to_wire(group) for group in window]}
                try:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        await self._changed.wait()
                except TimeoutError:
                    return {"wait": f"{queue.arrived} of {queue.expected} groups"}

    async def _report(self, request: dict[str, Any]) -> dict[str, Any]:
        """Complete the trainer's figures and append them to steps.jsonl."""
        figures, step = request["figures"], request["step"]
        devices = 1 + self.config.rollout.instances
        report = StepReport(
            step=step,
            weight_version=step,
            pool_size=self.service.pool.size if self.service is not None else 0,
            rollout_s=self._rollout_s,
            tokens_per_s_per_device=figures["trained_tokens"] / figures["step_s"] / devices,
            **figures,
        )
        self.folder.add_step(report)
        self.folder.add_samples(step, self._samples)
        self.trace.flush()
        return {}

    async def _failed(self, request: dict[str, Any]) -> dict[str, Any]:
        """The trainer ends with this error."""
        self.told = getattr(errors, request["error"], MetronomeError)(request["message"])
        return {}

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

