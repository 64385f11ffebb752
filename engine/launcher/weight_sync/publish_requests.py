"""Answers the trainer's requests about a publish, and runs the swaps that wait for the batches in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from engine.config import Config
from engine.errors import MetronomeError
from engine.launcher.batches import Batch
from engine.launcher.rollout_service import RolloutService
from engine.launcher.run_state import RunState
from engine.launcher.weight_sync.sync import WeightSync, probe
from engine.model.shape import read_shape
from engine.run.trace import Trace
from engine.schedule import Schedule
from engine.wire.messages import Done, FinishSync, MayPublish, OpenSync, PublishAllowed, SyncOpened, VerifySync


class PublishRequests:
    """Gives every instance exactly the version that the trainer publishes; else the run fails and names the cause."""

    def __init__(
        self,
        config: Config,
        service: RolloutService,
        trace: Trace,
        run_state: RunState,
        batches: Callable[[], Sequence[Batch]],
        allows_publish: Callable[[], bool],
        served: Callable[[int], None],
    ) -> None:
        """`batches`: returns the batches in flight; `allows_publish`: returns False while an evaluation needs the
        current weights; `served`: called with a version that all instances hold and were compared with."""
        self._config = config
        self._trace = trace
        self._run_state = run_state
        self._batches = batches
        self._allows_publish = allows_publish
        self._served = served
        self._version = 0
        self._schedule = Schedule.of(config.train, config.rollout.partial)
        self._swap: asyncio.Task[None] | None = None
        self._began = 0.0
        self.sync = self._make_weight_sync(service)
        """Leads the instances through weight syncs."""
        service.pool.sync = self.sync  # the pool asks it to bring late instances to the weights

    def _make_weight_sync(self, service: RolloutService) -> WeightSync:
        config = self._config
        rollout = config.rollout
        vocabulary = read_shape(Path(config.model.path)).vocabulary
        return WeightSync(
            pool=service.pool,
            probe=probe(vocabulary, config.weights.check_tokens, rollout.max_context, config.model.dtype),
            timeout_s=rollout.timeout_s,
            staged=config.weights.staged,
            cut=rollout.partial,
            in_turn=self._in_background and not self._schedule.exact and not rollout.partial,
        )

    async def may_publish(self, request: MayPublish) -> PublishAllowed:
        """Reply whether weights may be published now; the trainer asks again if not.

        The last swap must be finished, and no evaluation may need the current weights. If each batch has one version
        and weights are not swapped in the background, all batches in flight must be generated.
        """
        self._run_state.check()
        now = await self._run_state.wait_briefly(lambda: self._may_publish_now() or None)
        return PublishAllowed(now is not None)

    def _may_publish_now(self) -> bool:
        generated = self._in_background or not self._schedule.exact or all(batch.generated for batch in self._batches())
        return generated and (self._swap is None or self._swap.done()) and self._allows_publish()

    @property
    def _in_background(self) -> bool:
        """Whether instances swap to staged weights once they have finished their responses, while the trainer goes on.

        This is the delayed parameter update of AsyncFlow §4.2.3.
        """
        return self._schedule.ahead > 0 and self._config.weights.staged

    async def open(self, request: OpenSync) -> SyncOpened:
        """Begin a weight sync (WeightSync.open): buckets may follow. If the run is stopping, raise the error that
        stops it."""
        self._run_state.check()
        self._began = time.time()
        return await self.sync.open(request)

    async def finish(self, request: FinishSync) -> Done:
        """Finish the weight sync (WeightSync.finish), or start a task that does so in the background."""
        self._version = request.version
        swap = self._finish_sync(request)
        if self._in_background:
            self._swap = asyncio.create_task(self._swap_in_background(swap, self._batches()))
        else:
            await swap
        return Done()

    async def verify(self, request: VerifySync) -> Done:
        """Take in the trainer's log-probabilities of the probe, for the comparison with every instance's.

        The comparison ends before this returns, or is part of the swap in the background.
        """
        self._run_state.check()
        self.sync.expect(request.expected)
        if not self._in_background:
            await self._checked()
        return Done()

    async def _checked(self) -> None:
        await self.sync.checked()
        self._served(self._version)

    async def _finish_sync(self, request: FinishSync) -> None:
        await self.sync.finish(request)
        self._trace.add("sync", self._began, time.time(), lane="instances", step=request.version)

    async def _swap_in_background(self, swap: Awaitable[None], batches: Sequence[Batch]) -> None:
        """Run `swap`, then wait for the comparison. If each batch has one version, wait first until `batches` are
        generated; else each instance swaps when it becomes free."""
        try:
            if self._schedule.exact:
                await self._run_state.wait_until(lambda: all(batch.generated for batch in batches))
            await swap
            await self._checked()
        except MetronomeError as error:
            await self._run_state.fail(error)
        await self._run_state.notify()

    async def wait_for_swap(self) -> None:
        """Wait for the swap in the background if the next batch needs the new version from its first response on."""
        if self._swap is not None and (self._schedule.exact or self._config.rollout.partial):
            await asyncio.wait([self._swap])

    def check(self) -> None:
        """Raise the unexpected exception of a finished swap, if any: a bug of the launcher."""
        if self._swap is not None and self._swap.done():
            self._swap.result()

    async def close(self) -> None:
        """Cancel the swap in the background, and close the weight sync."""
        if self._swap is not None:
            self._swap.cancel()
            await asyncio.gather(self._swap, return_exceptions=True)
        await self.sync.close()
