"""The service's state, and the method that answers each request of a program outside.

The batches, their queues, the schedule and the weight sync are those of a run; only the policy of the leases is another
one (engine.launcher.leases).
"""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from pathlib import Path

import msgspec

from engine.config import Config
from engine.data.loader import PromptLoader
from engine.data.prompts import prompt_id
from engine.errors import BadInput, MetronomeError, ServiceConflict, ServiceFull, WeightSyncError
from engine.launcher.batches import Batch, BatchGenerator
from engine.launcher.batches_in_flight import BatchesInFlight
from engine.launcher.leases import DeadlineLeases
from engine.launcher.rollout_service import RolloutService
from engine.launcher.run_state import RunState
from engine.launcher.service.group_check import GroupCheck
from engine.launcher.weight_sync.publish_requests import PublishRequests
from engine.model.shape import read_shape
from engine.run.trace import Trace
from engine.schedule import Schedule
from engine.types import JsonObject, Prompt
from engine.wire import messages
from engine.wire.codec import open_ids
from engine.wire.messages import Done, EndOfStep, Message, StillWaiting
from engine.wire.service_messages import (
    SERVICE_PROTOCOL,
    AwaitVersion,
    EnginesReady,
    InitEngines,
    PromptData,
    PutGroup,
    PutPrompts,
    Sampled,
    SampleResponses,
    SyncRequest,
    Taken,
)

SAMPLED_AT_ONCE = 8
"""Groups of programs outside that are sampled or wait for it, as a multiple of the instances' places."""


class ServiceDesk:
    """Holds the steps of a trainer outside, and answers every program's requests.

    The groups of a step come from its prompts or from outside, never both. Each is trained once: the next version is
    published only when every group of the steps before it is acknowledged.
    """

    def __init__(
        self, config: Config, trace: Trace, loader: PromptLoader, service: RolloutService, weights: Path
    ) -> None:
        """`weights`: folder for weights on their way to the instances."""
        self._config = config
        self._service = service
        self._weights = weights
        self._run_state = RunState()
        self._schedule = Schedule.of(config.train, config.rollout.partial)
        self._generator = BatchGenerator(config, loader, service, self._run_state.notify)
        self._batches = BatchesInFlight(self._run_state)
        self._leases = DeadlineLeases(config.service.lease_s)
        self._check = GroupCheck(config, read_shape(Path(config.model.path)).vocabulary)
        self._digests: dict[int, dict[int, bytes]] = {}
        """By step: the digest of each group that came from outside, by index."""
        self._prompts: dict[int, bytes] = {}
        """By step: the digest of its prompts."""
        self._bytes: dict[int, int] = {}
        """By step: bytes that programs have put."""
        self._publishing = PublishRequests(
            config=config,
            service=service,
            trace=trace,
            run_state=self._run_state,
            batches=self._batches.values,
            allows_publish=lambda: True,
            served=self._served,
        )
        self._sampling = 0
        self.version: int | None = None
        """The newest version that every instance holds and has verified; None before the first."""
        self._offered: int | None = None
        """The version that was opened last."""
        self._unverified = False
        """Whether the instances were told to serve a version that is not compared with the trainer's yet."""

    # the state ------------------------------------------------------------------------------------

    @property
    def failure(self) -> MetronomeError | None:
        """The error that ends the service; None while it goes on."""
        return self._run_state.failure

    @property
    def held_bytes(self) -> int:
        """Bytes of groups and prompts from outside that are not trained yet."""
        return sum(self._bytes.values())

    def status(self) -> JsonObject:
        """What GET /status answers."""
        return {
            "version": self.version,
            "steps": self._batches.steps,
            "arrived": [batch.queue.arrived for batch in self._batches.values()],
            "held_bytes": self.held_bytes,
            "pool_size": self._service.pool.size,
            "failure": str(self.failure) if self.failure is not None else None,
        }

    async def check(self) -> None:
        """End the service if the pool gave up, or if a generation ended without all of its groups.

        Raises an exception of a background task that is not a MetronomeError: that is a bug.
        """
        await self._batches.check()
        self._publishing.check()
        if self.failure is None and self._service.pool.failure is not None:
            await self._run_state.fail(self._service.pool.failure)

    async def close(self) -> None:
        """Cancel what is under way."""
        await self._batches.close()
        await self._publishing.close()

    async def init_engines(self, request: InitEngines) -> EnginesReady:
        """Tell a program what it uses. Raises BadInput for another version of the protocol."""
        if request.protocol != SERVICE_PROTOCOL:
            raise BadInput(
                f"this program speaks version {request.protocol} of the service protocol, the service version "
                f"{SERVICE_PROTOCOL}: install the same release of Metronome for both"
            )
        return EnginesReady(self._config.model_dump_json(), str(self._weights), self.version)

    # weights --------------------------------------------------------------------------------------

    async def sync(self, request: SyncRequest) -> Message:
        """A part of a publish, as of the trainer of a run. Raises ServiceConflict where the schedule has no place for
        the version. A WeightSyncError ends the service, as it ends a run: instances may hold anything."""
        self._run_state.check()
        try:
            return await self._sync(request)
        except WeightSyncError as error:
            await self._run_state.fail(error)
            raise

    async def _sync(self, request: SyncRequest) -> Message:
        publishing = self._publishing
        if isinstance(request, messages.MayPublish):
            self._check_version(request.version)
            return await publishing.may_publish(request)
        if isinstance(request, messages.OpenSync):
            self._check_version(request.version)
            if self._unverified:
                raise WeightSyncError(
                    f"weight version {self._offered} was never compared with the trainer's, which may have died before"
                )
            self._offered = request.version
            if request.version == self.version:  # the trainer was started again: what it had trained is lost
                for batch in self._batches.values():
                    self._leases.begin_again(batch.queue)
            return await publishing.open(request)
        if isinstance(request, messages.VerifySync):
            if not self._unverified:
                raise ServiceConflict("no weight version waits to be verified")
            verified = await publishing.verify(request)
            self._unverified = False
            return verified
        version = request.info.version if isinstance(request, messages.SendBucket) else request.version
        if version != self._offered:
            raise ServiceConflict(f"weight version {version} was not opened; version {self._offered} is")
        match request:
            case messages.ConnectSync():
                return await publishing.sync.connect(request)
            case messages.SendBucket():
                return await publishing.sync.bucket(request)
            case messages.AbortSync():
                return await publishing.sync.abort(request)
            case messages.FinishSync():
                done = await publishing.finish(request)
                self._unverified = True
                return done

    def _check_version(self, version: int) -> None:
        due = version if self.version is None else self.version + 1
        if version not in (due, self.version) or version < 0:
            raise ServiceConflict(
                f"weight version {version}: version {self.version} was published last, so {due} is the next"
            )
        for step in self._batches.steps:
            batch = self._batches.get(step)
            if batch is not None and step < version and not batch.queue.done:
                raise ServiceConflict(
                    f"weight version {version}: of step {step} not every group is acknowledged "
                    f"({batch.queue.arrived} of {batch.queue.expected} have arrived)"
                )

    def _served(self, version: int) -> None:
        """Every instance holds the version. The steps before it are over."""
        self.version = version
        for step in self._batches.steps:
            if step < version:
                self._batches.pop(step)
                self._leases.forget(step)
                for held in (self._digests, self._prompts, self._bytes):
                    held.pop(step, None)

    async def await_version(self, request: AwaitVersion) -> Done | StillWaiting:
        """Wait for a version."""
        found = await self._run_state.wait_briefly(
            lambda: Done() if self.version is not None and self.version >= request.version else None
        )
        return found or StillWaiting()

    # what is put ----------------------------------------------------------------------------------

    def _check_step(self, step: int) -> int:
        """Return the newest version. Raises ServiceConflict unless the schedule lets the step be sampled with it."""
        if self.version is None:
            raise ServiceConflict(f"step {step}: no weight version was published yet")
        last = self.version + self._schedule.ahead
        if not self.version <= step <= last:
            raise ServiceConflict(
                f"step {step}: with weight version {self.version} mode {self._config.train.mode!r} takes "
                + (f"step {last}" if last == self.version else f"steps {self.version} to {last}")
            )
        return self.version

    async def put_prompts(self, request: PutPrompts, size: int) -> Taken:
        """Start a step: its responses are sampled and scored in the background. `size`: bytes of the request."""
        self._run_state.check()
        step = request.step
        digest = hashlib.sha256(msgspec.msgpack.encode(request)).digest()
        if self._prompts.get(step) == digest:
            return Taken(new=False)
        self._check_step(step)
        if self._batches.get(step) is not None:
            raise ServiceConflict(
                f"step {step} has other prompts already" if step in self._prompts else _from_outside(step)
            )
        prompts = None
        if request.prompts is not None:
            prompts = [(step, prompt) for prompt in self._own_prompts(request.prompts)]
            self._bytes[step] = size
        self._prompts[step] = digest
        batch, before = self._generator.begin(step)
        self._batches.start(step, batch, self._generator.fill(step, batch, before, prompts))
        return Taken(new=True)

    def _own_prompts(self, given: tuple[PromptData, ...]) -> list[Prompt]:
        expected = self._config.train.prompts_per_step
        if len(given) != expected:
            raise BadInput(f"{len(given)} prompts, expected {expected} (train.prompts_per_step)")
        return [self._own_prompt(number, data) for number, data in enumerate(given)]

    def _own_prompt(self, number: int, data: PromptData) -> Prompt:
        prompt = Prompt(
            id=prompt_id(data.problem, data.answer),
            problem=data.problem,
            answer=data.answer,
            token_ids=_ids(data.token_ids),
            columns=data.columns,
        )
        if wrong := self._check.problem_of_prompt(prompt):
            raise BadInput(f"prompt {number}: {wrong}")
        return prompt

    async def put_group(self, request: PutGroup) -> Taken:
        """Take a group from outside into the queue of its step, which the first such group begins."""
        self._run_state.check()
        group = request.group
        known = self._digests.get(group.step, {}).get(group.index)
        if known is None:
            newest = self._check_step(group.step)
            await asyncio.to_thread(self._check.check, group, newest)
            known = self._digests.get(group.step, {}).get(group.index)  # another request may have put it meanwhile
        if known == group.digest:
            return Taken(new=False)
        if known is not None:
            raise ServiceConflict(f"step {group.step} has another group {group.index} already (another digest)")
        self._check_step(group.step)
        batch = self._batches.get(group.step)
        if batch is None:
            batch = Batch.of(self._config, group.step)
            self._batches.keep(group.step, batch)
        elif group.step in self._prompts:
            raise ServiceConflict(f"step {group.step} has prompts, and its groups are sampled here")
        batch.put(group, self._config)
        self._digests.setdefault(group.step, {})[group.index] = group.digest
        self._bytes[group.step] = self._bytes.get(group.step, 0) + len(group.body)
        await self._run_state.notify()
        return Taken(new=True)

    # what is taken --------------------------------------------------------------------------------

    async def lease(self, request: messages.Lease) -> messages.Work:
        """Acknowledge what a program has trained, and wait for its next window of a step, or for the step's end."""
        if self._leases.acknowledge(request):
            await self._run_state.notify()  # others may wait for the end of the step
        if not request.budget:
            return StillWaiting()
        return await self._run_state.wait_briefly(partial(self._next_work, request)) or StillWaiting()

    def _next_work(self, request: messages.Lease) -> messages.Work | None:
        if self.version is not None and request.step < self.version and request.step not in self._batches.steps:
            return EndOfStep()
        batch = self._batches.get(request.step)
        if batch is None:
            return None
        if batch.queue.done:
            return EndOfStep()
        self._run_state.check()
        return self._leases.give(batch.queue, request)

    async def sample(self, request: SampleResponses) -> Sampled:
        """Sample responses to a prompt. Raises ServiceFull while too many wait for that."""
        self._run_state.check()
        if self.version is None:
            raise ServiceConflict("no weight version was published yet, so no instance samples")
        prompt = Prompt("outside", "", "", _ids(request.prompt))
        most = self._config.rollout.group_size
        if wrong := self._check.problem_of_prompt(prompt):
            raise BadInput(wrong)
        if not 0 < len(request.seeds) <= most or any(not 0 <= seed < 2**63 for seed in request.seeds):
            raise BadInput(f"seeds: expected 1 to {most} (rollout.group_size) numbers of 0 to 2^63 - 1")
        places = self._config.rollout.concurrency * max(1, self._service.pool.size)
        if self._sampling >= SAMPLED_AT_ONCE * places:
            raise ServiceFull(f"{self._sampling} groups are being sampled for programs outside; ask again later")
        self._sampling += 1
        try:
            return Sampled(tuple(await self._service.producer.sample(self.version, prompt, request.seeds)))
        finally:
            self._sampling -= 1


def _from_outside(step: int) -> str:
    return f"step {step} has groups from outside already, so it takes no prompts"


def _ids(buffer: bytes) -> tuple[int, ...]:
    try:
        return open_ids(buffer)
    except ValueError:
        raise BadInput(f"token ids: {len(buffer)} bytes are no int32 numbers") from None
