"""Weight updates of a rollout instance: other threads receive the bytes, the engine's thread copies them into the
model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from engine.errors import MetronomeError
from engine.instance.embedded.engine import Engine
from engine.instance.embedded.engine_thread import EngineThread
from engine.instance.embedded.weight_load import Named
from engine.instance.receiver import Receiver
from engine.types import JsonObject
from engine.wire.weights.backends import BACKENDS


class Updates:
    """The steps of a weight update, one at a time. The routes never cancel a step that has begun: it must end."""

    def __init__(self, worker: EngineThread, base: Path) -> None:
        """`base`: the folder that the model was loaded from."""
        self._worker = worker
        self._base = base
        self._receiver = Receiver()
        self._step = asyncio.Lock()
        self._loading: asyncio.Task[None] | None = None

    async def connect(self, init_info: JsonObject) -> None:
        """Call Receiver.connect, which cancels a transfer or a connect under way."""
        await asyncio.to_thread(self._receiver.connect, init_info)

    def close(self) -> None:
        """Cancel what is under way and leave the groups."""
        self._receiver.close()

    async def start_update(self) -> None:
        """Call Engine.start_update once a step under way has ended."""
        async with self._step:
            if self._loading is not None:
                await asyncio.gather(self._loading, return_exceptions=True)  # a bucket of the update that begins again
                self._loading = None
            await self._worker.call(Engine.start_update)

    async def update(self, update_info: JsonObject) -> None:
        """Receive and load a bucket, or begin to stage it.

        A malformed update_info is refused without effect; any later failure ends the update. A broadcast bucket is
        verified and loaded while the next one is received, so that the next call raises its error.
        """
        if update_info.get("staged"):
            self._receiver.stage(update_info)
        else:
            async with self._step:
                await self._receive_bucket(update_info)

    async def finish_update(self, version: int) -> None:
        """Call Engine.finish_update once every bucket is loaded."""
        async with self._step:
            await self._wait_for_previous()
            await self._worker.call(lambda engine: engine.finish_update(version))

    async def _receive_bucket(self, update_info: JsonObject) -> None:
        await self._worker.call(Engine.check_updating)
        self._receiver.check(update_info)
        transport = update_info.get("transport")
        if transport not in BACKENDS:
            await self._wait_for_previous()
            await self._load_bucket(
                lambda: list(self._receiver.receive(update_info, self._base)), cast=transport == "base"
            )
            return
        places = await self._worker.call(lambda engine: engine.lend(update_info["names"]))
        try:
            verify = await asyncio.to_thread(self._receiver.fetch, update_info, places)
        except MetronomeError:
            await self._wait_for_previous()
            await self._worker.call(Engine.fail_update)
            raise
        await self._wait_for_previous()
        self._loading = asyncio.create_task(self._load_bucket(verify))

    async def _wait_for_previous(self) -> None:
        """Wait until the previous bucket is loaded. Raise its error."""
        loading = self._loading
        self._loading = None
        if loading is not None:
            await loading

    async def _load_bucket(self, receive: Callable[[], list[Named]], cast: bool = False) -> None:
        try:
            tensors = await asyncio.to_thread(receive)
        except MetronomeError:
            await self._worker.call(Engine.fail_update)
            raise
        await self._worker.call(lambda engine: engine.update(tensors, cast))
