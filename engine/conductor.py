"""The launcher's event loop: answers the trainer, runs the producer, keeps the instances on the step's weights."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from engine import errors
from engine.config import Config
from engine.data.loader import PromptLoader
from engine.errors import DeadlineError, MetronomeError
from engine.model.shape import read_shape
from engine.queue.batch import Batch
from engine.queue.codec import group_to_wire, landed_to_wire
from engine.queue.server import Handler
from engine.queue.store import SampleQueue
from engine.rollout.service import Service
from engine.rollout.sync import WeightSync, probe
from engine.run_folder import SAMPLED_GROUPS, RunFolder
from engine.silence import Silence
from engine.trace import Trace
from engine.trainer.modes import Schedule
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
        self.last: dict[str, Any] = {}
        """The last finished step, as in steps.jsonl."""
        self._silence = Silence()
        self._is_ready = False
        self._schedule = Schedule.of(config.train)
        self._batches: dict[int, Batch] = {}
        self._swap: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._sync_began = 0.0
        self._recorder: Recorder | None = None
        self._replayed_by: dict[int, set[int]] = {}

    def handlers(self) -> dict[str, Handler]:
        """By the operation's name; each request is a sign of life of the trainer, at its start and at its end."""
        named = (self._ready, self._sync_open, self._sync_connect, self._sync_bucket, self._sync_abort, self._sync_finish,
                 self._movable, self._start, self._lease, self._replayed, self._report, self._failed)
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
        """Stop the run when the pool gave up or the trainer is silent; raise what is a mistake of ours in the producer."""
        for task in [batch.task for batch in self._batches.values()]:
            if task is not None and task.done():
                task.result()
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
        tasks = [task for task in (self._swap, *(batch.task for batch in self._batches.values())) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.trace.flush()

    async def _ready(self, request: dict[str, Any]) -> dict[str, Any]:
        self._is_ready = True
        self.folder.cut(request["start"])
        if self.config.train.record and self.service is not None:
            self._recorder = Recorder(self.folder.path / "record.msgpack", self.config, request["start"])
        return {}

    @cached_property
    def sync(self) -> WeightSync:
        """Leads the instances through weight syncs; the pool asks it to bring late ones to the weights."""
        assert self.service is not None
        config, rollout = self.config, self.config.rollout
        vocabulary = read_shape(Path(config.model.path)).vocabulary
        fixed = probe(vocabulary, config.weights.check_tokens, rollout.max_context, config.model.dtype)
        self.service.pool.sync = sync = WeightSync(self.service.pool, fixed, rollout.timeout_s, config.weights.staged)
        return sync

    async def _sync_open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Every instance gets exactly this version, or the run fails by name."""
        self._check()
        self._sync_began = time.time()
        return await self.sync.open(request["version"])

    async def _sync_connect(self, request: dict[str, Any]) -> dict[str, Any]:
        return await self.sync.connect(request["version"], request["stages"], request["transport"])

    async def _sync_bucket(self, request: dict[str, Any]) -> dict[str, Any]:
        return await self.sync.bucket(request["info"])

    async def _sync_abort(self, request: dict[str, Any]) -> dict[str, Any]:
        return await self.sync.abort(request["version"], request["reason"])

    async def _sync_finish(self, request: dict[str, Any]) -> dict[str, Any]:
        swap = self._finish(request["version"], request["snapshot"], request["expected"])
        if self._in_background:
            self._swap = asyncio.create_task(self._later(swap, list(self._batches.values())))
        else:
            await swap
        return {}

    async def _finish(self, version: int, snapshot: str, expected: list[float]) -> None:
        await self.sync.finish(version, snapshot, expected)
        self.trace.add("sync", self._sync_began, time.time(), lane="instances", step=version)

    async def _later(self, swap: Awaitable[None], batches: list[Batch]) -> None:
        """Swap once the batches in flight are generated, where each has one version; else each instance as it becomes free."""
        try:
            async with self._changed:
                while self._schedule.exact and not all(batch.generated for batch in batches):
                    await self._changed.wait()
            await swap
        except MetronomeError as error:
            await self.fail(error)
        await self._notify()

    async def _movable(self, request: dict[str, Any]) -> dict[str, Any]:
        """Whether weights may move: the last swap is through and, where each batch has one version, all are generated."""
        self._check()
        return await self._soon(lambda: {"now": True} if self._at_rest() else {})

    def _at_rest(self) -> bool:
        generated = self._in_background or not self._schedule.exact or all(batch.generated for batch in self._batches.values())
        return generated and (self._swap is None or self._swap.done())

    @property
    def _in_background(self) -> bool:
        """Whether instances take staged weights over when they have finished what they hold, while the trainer goes on.

        AsyncFlow §4.2.3: the delayed parameter update.
        """
        return self._schedule.ahead > 0 and self.config.weights.staged

    async def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start generating a step's batch in the background."""
        self._check()
        step = request["step"]
        batch = Batch.of(self.config, step)
        self._batches[step] = batch
        batch.task = asyncio.create_task(self._produce(step, batch))
        self._silence.expect(self.config.parallel.units)
        return {}

    async def _produce(self, step: int, batch: Batch) -> None:
        assert self.loader is not None
        assert self.service is not None
        if self._schedule.exact and self._swap is not None:
            await asyncio.wait([self._swap])  # its version is the one that is being swapped in
        queue, started = batch.queue, time.perf_counter()
        prompts = [(self.loader.epoch_of(step, i), prompt) for i, prompt in enumerate(self.loader.batch(step))]

        async def put(group: Group) -> None:
            await batch.put(group, self.config)
            if len(batch.samples) < SAMPLED_GROUPS:
                batch.samples.append(group)
            batch.rollout_s = time.perf_counter() - started
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
        unit = request["unit"]
        if (batch := self._batches.get(request["step"])) is None:
            raise MetronomeError(f"unit {unit} of the trainer asked for groups of step {request['step']}, which was not started")
        queue = batch.queue
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
        batch = self._batches.pop(step, None)
        pool_size = self.service.pool.working if self.service is not None else 0
        devices = self.config.parallel.ranks + pool_size * self.config.rollout.tensor
        report = StepReport(
            step=step,
            weight_version=step,
            pool_size=pool_size,
            rollout_s=batch.rollout_s if batch is not None else 0.0,
            tokens_per_s_per_device=figures["trained_tokens"] / figures["step_s"] / devices,
            **figures,
        )
        self.folder.add_step(report)
        self.last = dataclasses.asdict(report)
        self.folder.add_samples(step, batch.samples if batch is not None else [])
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

