"""Answers the trainer's requests about a publish, and runs the swaps that wait for the batches in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from engine.config import Config
from engine.errors import MetronomeError, ServiceConflict, WeightSyncError
from engine.model.shape import read_shape
from engine.orchestrator.publish.sync import WeightSync, make_probe
from engine.orchestrator.rollout_service import RolloutService
from engine.orchestrator.run_state import RunState
from engine.orchestrator.steps import Step, Steps
from engine.run.trace import Trace
from engine.schedule import Schedule
from engine.wire.messages import (
    AbortSync,
    AwaitVersion,
    ConnectSync,
    Done,
    FinishSync,
    MayPublish,
    OpenSync,
    Proceed,
    PublishAllowed,
    SendBucket,
    StillWaiting,
    SyncOpened,
    VerifySync,
)

T = TypeVar("T")


class PublishRequests:
    """Gives every instance exactly the version that the trainer publishes. Otherwise the run fails and names the cause.

    The first version may be any, for a trainer that resumes. Each later one is the next version, or the last one
    again: to all instances if the trainer was restarted, or only to those that lack it (`decide_again`). A
    WeightSyncError ends the run, since the instances may hold anything.
    """

    def __init__(
        self,
        config: Config,
        service: RolloutService,
        trace: Trace,
        run_state: RunState,
        steps: Steps,
        allows_publish: Callable[[bool], bool],
        served: Callable[[int], None],
        trains: bool = True,
        text: Iterable[int] = (),
        recorded: float = 0.0,
    ) -> None:
        """`allows_publish`: returns False while an evaluation needs the current weights. Its argument: whether any
        instance serves. `served`: called with a version that all instances hold and that has been compared. `trains`:
        whether the trainer is ours. `text`: tokens of ordinary text, on which trainer and instances are compared.
        `recorded`: as in `Probe`."""
        self._config = config
        self._trace = trace
        self._run_state = run_state
        self._steps = steps
        self._allows_publish = allows_publish
        self._served = served
        self._trains = trains
        self._schedule = Schedule.of(config.train, config.rollout.partial)
        self._pool = service.pool
        self.swap: asyncio.Task[None] | None = None
        """The last swap in the background; None if the last publish had none."""
        self._began = 0.0
        self._took_s = 0.0
        """Seconds that the last publish took, from its OpenSync to its FinishSync."""
        self.version: int | None = None
        """The newest version that every instance was told to serve; None before the first."""
        self.verified: int | None = None
        """The newest version that every instance holds and that has been compared; None before the first."""
        self._offered: int | None = None
        """The version that was opened last."""
        self._is_open = False
        """Whether buckets may follow: from OpenSync to FinishSync."""
        self._unverified = False
        """Whether the trainer has not sent its log-probabilities of the version yet."""
        self.goes_again = False
        """Whether the last version must go again: from `decide_again` until it is opened. Every replica group of the
        trainer is told so, and gets no window."""
        self._again = False
        """Whether the version that was opened last went again."""
        self.sync = self._make_weight_sync(service, text, recorded)
        """Runs the weight syncs."""
        self._pool.check_arrivals(self.sync.self_test)

    def _make_weight_sync(self, service: RolloutService, text: Iterable[int], recorded: float) -> WeightSync:
        config = self._config
        rollout = config.rollout
        vocabulary = read_shape(Path(config.model.path)).vocabulary
        return WeightSync(
            pool=service.pool,
            probe=make_probe(
                vocabulary=vocabulary,
                count=config.weights.check_tokens,
                max_context=rollout.max_context,
                dtype=config.compared_dtype,
                text=text,
                recorded=recorded,
            ),
            timeout_s=rollout.timeout_s,
            staged=config.weights.staged,
            cut=rollout.partial,
            in_turn=self._swaps_late and not self._schedule.exact and not rollout.partial,
        )

    # requests -------------------------------------------------------------------------------------

    async def may_publish(self, request: MayPublish) -> PublishAllowed:
        """Reply whether weights may be published now; the trainer asks again if not.

        The last swap must be finished, and no evaluation may need the current weights. If each batch has one version
        and weights are not swapped in the background, all batches in flight must be generated. Where no instance
        serves, nothing is waited for: the policy has moved on, and the version that they need is lost. What is missing
        is sampled by the next version.
        """
        self._run_state.check_failure()
        self._check_version(request.version)
        now = await self._run_state.wait_briefly(lambda: self._may_publish_now() or None)
        return PublishAllowed(now is not None)

    def _check_version(self, version: int) -> None:
        """Raise ServiceConflict if the schedule does not allow the version now."""
        due = version if self.version is None else self.version + 1
        if version not in (due, self.version) or version < 0:
            raise ServiceConflict(
                f"weight version {version}: version {self.version} was published last, so the next is {due}"
            )
        for step in self._steps.values():
            if step.number < version and step.trained < step.expected:
                raise ServiceConflict(
                    f"weight version {version}: not every group of step {step.number} is acknowledged ({step.arrived} "
                    f"of {step.expected} have arrived)"
                )

    def _may_publish_now(self) -> bool:
        serves = self._pool.serving > 0
        generated = self._swaps_late or not self._schedule.exact or not serves or self._is_generated()
        return generated and (self.swap is None or self.swap.done()) and self._allows_publish(serves)

    def _is_generated(self) -> bool:
        return all(step.is_generated for step in self._steps.values())

    @property
    def _swaps_late(self) -> bool:
        """Whether instances swap to staged weights once they have finished their responses, while the trainer goes on.

        This is the delayed parameter update of AsyncFlow §4.2.3.
        """
        return self._schedule.ahead > 0 and self._config.weights.staged

    @property
    def _in_background(self) -> bool:
        """Whether this publish swaps so. When no instance serves, there is nothing to wait for."""
        return self._swaps_late and not self._again and self._pool.serving > 0

    # a version that goes again ----------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether the last version is published and compared, and none is open."""
        swaps = self.swap is not None and not self.swap.done()
        return not self._is_open and not self._unverified and not swaps and self.verified is not None

    def decide_again(self, idle_s: float) -> bool:
        """Return whether the last version goes again to the instances that lack it (`goes_again`).

        The caller guarantees that the trainer's weights are this version's and that the trainer has held no lease for
        `idle_s`. If other instances serve, this must have lasted as long as the last publish took, so that another one
        costs no more than the trainer has waited already.
        """
        if self.is_idle and self.sync.is_awaited:
            self.goes_again = self._pool.serving == 0 or idle_s >= self._took_s
        return self.goes_again

    @property
    def is_lost(self) -> bool:
        """Whether no instance of a service holds the last version, so that its trainer must publish it again. Our own
        trainer is told so when it asks for rows."""
        return not self._trains and self.is_idle and self._pool.size == 0

    async def open_sync(self, request: OpenSync) -> SyncOpened:
        """Begin a weight sync (WeightSync.open_sync), so that buckets may follow. Raises the error that stops the run,
        if any."""
        self._run_state.check_failure()
        self._check_version(request.version)
        if self._unverified and not self._trains:
            raise ServiceConflict(
                f"weight version {self._offered} waits to be compared with the trainer's (VerifySync); if the program "
                "that published it has died, start the service again"
            )
        if self._unverified:
            raise await self._failed(
                WeightSyncError(
                    f"weight version {self._offered} was never compared with the trainer's, which may have died before"
                )
            )
        if request.again and request.version != self.version:
            raise ServiceConflict(
                f"weight version {request.version} can't go again: version {self.version} was published last"
            )
        self._offered = request.version
        self._is_open = True
        self._again = request.again
        self.goes_again = False
        if request.version == self.version and not request.again:
            for number in self._steps.numbers:  # what the trainer had trained is lost
                self._steps.again(number)
        self._began = time.time()
        return await self._leading(self.sync.open_sync(request))

    async def connect_sync(self, request: ConnectSync) -> Proceed:
        """Have the instances join the groups (WeightSync.connect_sync)."""
        self._check_offered(request.version)
        return await self._leading(self.sync.connect_sync(request))

    async def send_bucket(self, request: SendBucket) -> Proceed:
        """Have the instances receive a bucket (WeightSync.send_bucket)."""
        self._check_offered(request.info.version)
        return await self._leading(self.sync.send_bucket(request))

    async def abort_sync(self, request: AbortSync) -> Proceed:
        """Handle a sender that failed to send (WeightSync.abort_sync)."""
        self._check_offered(request.version)
        return await self._leading(self.sync.abort_sync(request))

    async def finish_sync(self, request: FinishSync) -> Done:
        """Finish the weight sync (WeightSync.finish_sync), or start a task that does so in the background. A second
        request for the same version has no effect."""
        if not self._is_open and request.version == self.version:
            self._run_state.check_failure()
            return Done()  # a message that was sent twice
        self._check_offered(request.version)
        self._is_open = False
        self._took_s = time.time() - self._began
        swap = self._finish_sync(request)
        if self._in_background:
            self.swap = asyncio.create_task(self._swap_in_background(swap, self._steps.values()))
        else:
            self.swap = None
            await self._leading(swap)
        self.version = request.version
        self._unverified = True
        return Done()

    async def verify_sync(self, request: VerifySync) -> Done:
        """Take the trainer's log-probabilities of the probe, for comparison with those of every instance.

        The comparison ends before this returns, or is part of the swap in the background.
        """
        self._run_state.check_failure()
        if not self._unverified:
            raise ServiceConflict("no weight version waits to be verified")
        self.sync.expect_logprobs(request.expected)
        if self.swap is None:
            await self._leading(self._checked())
        self._unverified = False
        return Done()

    async def await_version(self, request: AwaitVersion) -> Done | StillWaiting:
        """Wait until all instances hold the version and have been compared; the caller asks again if this takes
        long."""
        found = await self._run_state.wait_briefly(
            lambda: Done() if self.verified is not None and self.verified >= request.version else None
        )
        return found or StillWaiting()

    def _check_offered(self, version: int) -> None:
        self._run_state.check_failure()
        if version != self._offered or not self._is_open:
            how = "is" if self._is_open else "was, and its sync is over"
            raise ServiceConflict(f"weight version {version} is not open for weights; version {self._offered} {how}")

    async def _leading(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except WeightSyncError as error:
            raise await self._failed(error) from None

    async def _failed(self, error: WeightSyncError) -> WeightSyncError:
        await self._run_state.stop_run(error)
        return error

    # swaps ----------------------------------------------------------------------------------------

    async def _checked(self) -> None:
        version = self._offered
        await self.sync.wait_until_checked()
        assert version is not None
        self.verified = version
        if not self._again:
            self._served(version)
        await self._run_state.notify()

    async def _finish_sync(self, request: FinishSync) -> None:
        await self.sync.finish_sync(request)
        self._trace.add_span("sync", self._began, time.time(), lane="instances", step=request.version)

    async def _swap_in_background(self, swap: Awaitable[None], steps: Sequence[Step]) -> None:
        """Run `swap`, then wait for the comparison. If each batch has one version, wait first until `steps` are
        generated, or no instance is left that generates them. Otherwise each instance swaps when it becomes free."""

        def generated() -> bool:
            return all(step.is_generated for step in steps)

        try:
            while self._schedule.exact and self._pool.serving and not generated():
                await self._run_state.wait_briefly(lambda: generated() or None)
            await swap
            await self._checked()
        except MetronomeError as error:
            await self._run_state.stop_run(error)
        await self._run_state.notify()

    def check_swap(self) -> None:
        """Raise the unexpected exception of a finished swap, if any. It is a bug in the orchestrator."""
        if self.swap is not None and self.swap.done():
            self.swap.result()

    async def close(self) -> None:
        """Cancel the swap in the background, and close the weight sync."""
        if self.swap is not None:
            self.swap.cancel()
            await asyncio.gather(self.swap, return_exceptions=True)
        await self.sync.close()
