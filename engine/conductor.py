"""The launcher's event loop: answers the trainer, runs the producer, keeps the instances on the step's weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from engine import errors
from engine.config import Config
from engine.data.loader import PromptLoader
from engine.errors import DeadlineError, MetronomeError
from engine.queue.codec import group_to_wire, landed_to_wire
from engine.queue.server import Handler
from engine.queue.store import SampleQueue
from engine.rollout.service import Service
from engine.run_folder import SAMPLED_GROUPS, RunFolder
from engine.silence import Silence
from engine.trace import Trace
from engine.trainer.record import Recorder
from engine.types import Group, Landed, StepReport

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
        """Without loader and service (a replay) only ready, replayed, report and failed are answered."""
        self.config = config
        self.folder = folder
        self.trace = trace
        self.loader = loader
        self.service = service
        self.failure: MetronomeError | None = None
        self.told: MetronomeError | None = None
        self._silence = Silence()
        self._is_ready = False
        self._queue: SampleQueue | None = None
        self._batch: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._rollout_s = 0.0
        self._samples: list[Group] = []
        self._recorder: Recorder | None = None
        self._replayed_by: dict[int, set[int]] = {}

    def handlers(self) -> dict[str, Handler]:
        """By the operation's name; each request is a sign of life of the trainer, at its start and at its end."""
        named = (self._ready, self._publish, self._start, self._lease, self._replayed, self._report, self._failed)
        return {handler.__name__.removeprefix("_"): self._hearing(handler) for handler in named}

    def _hearing(self, handler: Handler) -> Handler:
        async def heard(request: dict[str, Any]) -> dict[str, Any]:
            with self._silence.answering(request.get("unit")):
                return await handler(request)

        return heard

    async def fail(self, error: MetronomeError) -> None:
        """Stop the run: the trainer hears of it with its next request, saves a checkpoint and ends."""
        self.failure = self.failure or error
        await self._notify()

    async def _notify(self) -> None:
        """Wake whoever waits for something to lease."""
        async with self._changed:
            self._changed.notify_all()

    @property
    def _scores_early(self) -> bool:
        algorithm, train = self.config.algorithm, self.config.train
        return train.score_early and train.mode != "sync" and (algorithm.old_policy == "previous" or algorithm.kl_coef > 0)

    async def check(self) -> None:
        """Stop the run when no instance is left or the trainer is silent; raise what is a mistake of ours in the producer."""
        if self._batch is not None and self._batch.done():
            self._batch.result()
        if self.failure is None and self.service is not None and self.service.pool.size == 0:
            await self.fail(await asyncio.to_thread(self.service.pool.all_gone))
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
        """Cancel the batch under way."""
        if self._batch is not None:
            self._batch.cancel()
            await asyncio.gather(self._batch, return_exceptions=True)
        self.trace.flush()

    async def _ready(self, request: dict[str, Any]) -> dict[str, Any]:
        self._is_ready = True
        self.folder.cut(request["start"])
        if self.config.train.record and self.service is not None:
            self._recorder = Recorder(self.folder.path / "record.msgpack", self.config, request["start"])
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
            request["step"], train.prompts_per_step, train.consume, train.mode == "sync", self.config.parallel.units
        )
        self._batch = asyncio.create_task(self._produce(request["step"], self._queue))
        self._silence.expect(self.config.parallel.units)
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
            await self._notify()

        async def land(landed: Landed) -> None:
            queue.land(landed)
            await self._notify()

        try:
            await self.service.producer.run(step, prompts, put, land if self._scores_early else None)
        except MetronomeError as error:
            await self.fail(error)

    async def _lease(self, request: dict[str, Any]) -> dict[str, Any]:
        """The next window for a unit of the trainer; "end" when all are trained; "wait" as a sign of life."""
        queue, unit = self._queue, request["unit"]
        if queue is None or queue.step != request["step"]:
            raise MetronomeError(f"unit {unit} of the trainer asked for groups of step {request['step']}, which was not started")
        queue.acknowledge(request["trained"], unit)
        if queue.done:
            await self._notify()  # the other units wait for this
        found = await self._soon(lambda: self._due(queue, unit, request["budget"]))
        if found.get("end"):
            self._silence.excuse(unit)
        elif found and self._recorder is not None:
            self._recorder.add(queue.step, unit, found)
        return found or {"wait": f"{queue.arrived} of {queue.expected} groups"}

    async def _replayed(self, request: dict[str, Any]) -> dict[str, Any]:
        """A unit goes on with its replay; once it is `done` with the step it waits for the others, who may yet fail."""
        self._check()
        if not request["done"]:
            return {}
        done, units = self._replayed_by.setdefault(request["step"], set()), self.config.parallel.units
        done.add(request["unit"])
        await self._notify()
        return await self._soon(lambda: {"end": True} if len(done) == units else {})

    async def _soon(self, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `look` finds, tried again whenever something changes; {} when it is time for a sign of life."""
        deadline = time.monotonic() + SIGN_OF_LIFE_S
        async with self._changed:
            while not (found := look()):
                self._check()
                try:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        await self._changed.wait()
                except TimeoutError:
                    break
        return found

    def _due(self, queue: SampleQueue, unit: int, budget: int) -> dict[str, Any]:
        """The end of the step, else a window to train, else responses to score early; {} when there is neither."""
        if queue.done:
            return {"end": True}
        self._check()  # a run that fails gives out nothing more
        if window := queue.lease(unit, budget):
            return {"groups": [group_to_wire(group) for group in window]}
        if landed := queue.early(unit, budget):
            return {"landed": [landed_to_wire(one) for one in landed]}
        return {}

    async def _report(self, request: dict[str, Any]) -> dict[str, Any]:
        """Complete the trainer's figures and append them to steps.jsonl."""
        figures, step = request["figures"], request["step"]
        devices = self.config.parallel.ranks + self.config.rollout.instances
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
        if self._recorder is not None:
            self._recorder.flush()
        self.trace.flush()
        return {}

    async def _failed(self, request: dict[str, Any]) -> dict[str, Any]:
        """A unit of the trainer ends with this error; the others hear of it with their next request."""
        self.told = self.told or getattr(errors, request["error"], MetronomeError)(request["message"])
        await self.fail(self.told)
        return {}

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

