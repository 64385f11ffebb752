"""The launcher's side of a weight sync: the trainer's requests, and swaps that wait for the batches in flight."""

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
    """Every instance gets exactly the version that the trainer publishes, or the run fails by name."""

    def __init__(
        self,
        config: Config,
        service: RolloutService,
        trace: Trace,
        run_state: RunState,
        batches: Callable[[], Sequence[Batch]],
        allows_publish: Callable[[], bool],
    ) -> None:
        """`batches`: those in flight; `allows_publish`:
        whether nothing else (an evaluation) needs the weights where they are."""
        self._config = config
        self._trace = trace
        self._run_state = run_state
        self._batches = batches
        self._allows_publish = allows_publish
        self._schedule = Schedule.of(config.train, config.rollout.partial)
        self._swap: asyncio.Task[None] | None = None
        self._began = 0.0
        self.sync = self._weight_sync(service)
        """Leads the instances through weight syncs."""
        service.pool.sync = self.sync  # the pool asks it to bring late instances to the weights

    def _weight_sync(self, service: RolloutService) -> WeightSync:
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
        """Whether weights may move: the last swap is through and,
        where each batch has one version, all are generated."""
        self._run_state.check()
        now = await self._run_state.wait_briefly(lambda: self._may_publish_now() or None)
        return PublishAllowed(now is not None)

    def _may_publish_now(self) -> bool:
        generated = self._in_background or not self._schedule.exact or all(batch.generated for batch in self._batches())
        return generated and (self._swap is None or self._swap.done()) and self._allows_publish()

    @property
    def _in_background(self) -> bool:
        """Whether instances take staged weights over when they have finished what they hold, while the trainer goes on.

        AsyncFlow §4.2.3: the delayed parameter update.
        """
        return self._schedule.ahead > 0 and self._config.weights.staged

    async def open(self, request: OpenSync) -> SyncOpened:
        """WeightSync.open, unless the run stops."""
        self._run_state.check()
        self._began = time.time()
        return await self.sync.open(request)

    async def finish(self, request: FinishSync) -> Done:
        """WeightSync.finish; where instances take the weights over in the background, its beginning."""
        swap = self._finish(request)
        if self._in_background:
            self._swap = asyncio.create_task(self._swap_in_background(swap, self._batches()))
        else:
            await swap
        return Done()

    async def verify(self, request: VerifySync) -> Done:
        """The trainer's log-probabilities, which are compared with every instance's:
        before this returns, or by the swap."""
        self._run_state.check()
        self.sync.expect(request.expected)
        if not self._in_background:
            await self.sync.checked()
        return Done()

    async def _finish(self, request: FinishSync) -> None:
        await self.sync.finish(request)
        self._trace.add("sync", self._began, time.time(), lane="instances", step=request.version)

    async def _swap_in_background(self, swap: Awaitable[None], batches: Sequence[Batch]) -> None:
        """Swap once the batches in flight are generated, where each has one version;
        else each instance as it becomes free."""
        try:
            if self._schedule.exact:
                await self._run_state.wait_until(lambda: all(batch.generated for batch in batches))
            await swap
            await self.sync.checked()
        except MetronomeError as error:
            await self._run_state.fail(error)
        await self._run_state.notify()

    async def wait_for_swap(self) -> None:
        """Until a swap in the background is through, where a batch needs its version from the first response on."""
        if self._swap is not None and (self._schedule.exact or self._config.rollout.partial):
            await asyncio.wait([self._swap])

    def check(self) -> None:
        """Raise what is a mistake of ours in the swap."""
        if self._swap is not None and self._swap.done():
            self._swap.result()

    async def close(self) -> None:
        """End what is under way."""
        if self._swap is not None:
            self._swap.cancel()
            await asyncio.gather(self._swap, return_exceptions=True)
        await self.sync.close()
