"""Weight updates of a rollout instance: bytes are received beside the engine's thread,
which then copies them into the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import MetronomeError
from engine.instance.embedded.engine import Engine
from engine.instance.embedded.engine_thread import EngineThread
from engine.instance.embedded.weight_load import Named
from engine.instance.receiver import Receiver
from engine.wire.weights.groups import BACKENDS


class Updates:
    """One step at a time. A step that has begun must be carried out to its end: the routes never cancel one."""

    def __init__(self, worker: EngineThread, base: Path) -> None:
        """`base`: the folder that the model was loaded from."""
        self._worker = worker
        self._base = base
        self._receiver = Receiver()
        self._step = asyncio.Lock()
        self._loading: asyncio.Task[None] | None = None

    async def connect(self, init_info: dict[str, Any]) -> None:
        """Receiver.connect, which calls off a transfer or a connect under way."""
        await asyncio.to_thread(self._receiver.connect, init_info)

    def close(self) -> None:
        """Call off what is under way and leave the groups."""
        self._receiver.close()

    async def start_update(self) -> None:
        """Engine.start_update, once a step under way has ended."""
        async with self._step:
            if self._loading is not None:
                await asyncio.gather(self._loading, return_exceptions=True)  # of the update that begins again
                self._loading = None
            await self._worker.call(Engine.start_update)

    async def update(self, update_info: dict[str, Any]) -> None:
        """Receive and load a bucket, or begin to stage it. What fails once the update_info is accepted ends the update.

        A broadcast bucket is verified and loaded while the next one comes in: what is wrong with it is told to the next
        call.
        """
        if update_info.get("staged"):
            self._receiver.stage(update_info)
        else:
            async with self._step:
                await self._update(update_info)

    async def finish_update(self, version: int) -> None:
        """Engine.finish_update, once everything is loaded."""
        async with self._step:
            await self._loaded()
            await self._worker.call(lambda engine: engine.finish_update(version))

    async def _update(self, update_info: dict[str, Any]) -> None:
        await self._worker.call(Engine.check_updating)
        self._receiver.check(update_info)
        transport = update_info.get("transport")
        if transport not in BACKENDS:
            await self._loaded()
            await self._load(lambda: list(self._receiver.receive(update_info, self._base)), cast=transport == "base")
            return
        places = await self._worker.call(lambda engine: engine.lend(update_info["names"]))
        try:
            verify = await asyncio.to_thread(self._receiver.fetch, update_info, places)
        except MetronomeError:
            await self._loaded()
            await self._worker.call(Engine.fail_update)
            raise
        await self._loaded()
        self._loading = asyncio.create_task(self._load(verify))

    async def _loaded(self) -> None:
        """Until the bucket before is loaded; raises what was wrong with it."""
        loading = self._loading
        self._loading = None
        if loading is not None:
            await loading

    async def _load(self, receive: Callable[[], list[Named]], cast: bool = False) -> None:
        try:
            tensors = await asyncio.to_thread(receive)
        except MetronomeError:
            await self._worker.call(Engine.fail_update)
            raise
        await self._worker.call(lambda engine: engine.update(tensors, cast))
