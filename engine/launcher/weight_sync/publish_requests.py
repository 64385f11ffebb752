"""The launcher's side of a weight sync: the trainer's requests, and swaps that wait for the batches in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.errors import MetronomeError
from engine.launcher.batches import Batch
from engine.launcher.rollout_service import RolloutService
from engine.launcher.run_state import RunState
from engine.launcher.weight_sync.sync import WeightSync, probe
from engine.model.shape import read_shape
from engine.run.trace import Trace
from engine.schedule import Schedule
from engine.wire.control_server import Handler


class PublishRequests:
    """Every instance gets exactly the version that the trainer publishes, or the run fails by name."""

    def __init__(
        self,
        config: Config,
        service: RolloutService | None,
        trace: Trace,
        run_state: RunState,
        batches: Callable[[], Sequence[Batch]],
        allows_publish: Callable[[], bool],
    ) -> None:
        """`batches`: those in flight; `allows_publish`:
        whether nothing else (an evaluation) needs the weights where they are."""
        self._config = config
        self._service = service
        self._trace = trace
        self._run_state = run_state
        self._batches = batches
        self._allows_publish = allows_publish
        self._schedule = Schedule.of(config.train, config.rollout.partial)
        self._swap: asyncio.Task[None] | None = None
        self._began = 0.0

    def handlers(self) -> tuple[Handler, ...]:
        """Named as the trainer's operations."""
        return (
            self.may_publish,
            self.sync_open,
            self.sync_connect,
            self.sync_bucket,
            self.sync_abort,
            self.sync_finish,
            self.sync_verify,
        )

    @cached_property
    def sync(self) -> WeightSync:
        """Leads the instances through weight syncs; the pool asks it to bring late ones to the weights."""
        assert self._service is not None
        config = self._config
        rollout = self._config.rollout
        vocabulary = read_shape(Path(config.model.path)).vocabulary
        fixed = probe(vocabulary, config.weights.check_tokens, rollout.max_context, config.model.dtype)
        in_turn = self._in_background and not self._schedule.exact and not rollout.partial
        self._service.pool.sync = sync = WeightSync(
            pool=self._service.pool,
            probe=fixed,
            timeout_s=rollout.timeout_s,
            staged=config.weights.staged,
            cut=rollout.partial,
            in_turn=in_turn,
        )
        return sync

    async def may_publish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Whether weights may move: the last swap is through and,
        where each batch has one version, all are generated."""
        self._run_state.check()
        return await self._run_state.wait_briefly(lambda: {"now": True} if self._may_publish_now() else {})

    def _may_publish_now(self) -> bool:
        generated = self._in_background or not self._schedule.exact or all(batch.generated for batch in self._batches())
        return generated and (self._swap is None or self._swap.done()) and self._allows_publish()

    @property
    def _in_background(self) -> bool:
        """Whether instances take staged weights over when they have finished what they hold, while the trainer goes on.

        AsyncFlow §4.2.3: the delayed parameter update.
        """
        return self._schedule.ahead > 0 and self._config.weights.staged

    async def sync_open(self, request: dict[str, Any]) -> dict[str, Any]:
        """WeightSync.open."""
        self._run_state.check()
        self._began = time.time()
        return await self.sync.open(request["version"])

    async def sync_connect(self, request: dict[str, Any]) -> dict[str, Any]:
        """WeightSync.connect."""
        return await self.sync.connect(request["version"], request["stages"], request["transport"])

    async def sync_bucket(self, request: dict[str, Any]) -> dict[str, Any]:
        """WeightSync.bucket."""
        return await self.sync.bucket(request["info"])

    async def sync_abort(self, request: dict[str, Any]) -> dict[str, Any]:
        """WeightSync.abort."""
        return await self.sync.abort(request["version"], request["reason"])

    async def sync_finish(self, request: dict[str, Any]) -> dict[str, Any]:
        """WeightSync.finish; where instances take the weights over in the background, its beginning."""
        swap = self._finish(request["version"], request["snapshot"])
        if self._in_background:
            self._swap = asyncio.create_task(self._swap_in_background(swap, self._batches()))
        else:
            await swap
        return {}

    async def sync_verify(self, request: dict[str, Any]) -> dict[str, Any]:
        """The trainer's log-probabilities, which are compared with every instance's:
        before this returns, or by the swap."""
        self._run_state.check()
        self.sync.expect(request["expected"])
        return {} if self._in_background else await self.sync.checked()

    async def _finish(self, version: int, snapshot: str) -> None:
        await self.sync.finish(version, snapshot)
        self._trace.add("sync", self._began, time.time(), lane="instances", step=version)

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
        if "sync" in self.__dict__:  # else there was none
            await self.sync.close()
