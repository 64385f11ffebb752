"""Stores that hold the bodies of columns outside the table, between the last response and the lease: `ColumnStore`.

The table tracks which rows are leased and trained.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from engine.config import Config
from engine.errors import DeadlineError, StoreError
from engine.run.commands import store_command
from engine.run.process import Child, hold_lifeline
from engine.wire.access_token import is_loopback
from engine.wire.store_addresses import StoreAddresses, read_addresses
from engine.wire.store_client import StoreClient, StoreFault

T = TypeVar("T")


class ColumnStore(Protocol):
    """Keeps the bodies of columns outside the orchestrator, by step, index of the row and name of the column.

    Each call raises StoreFault if the store does not answer or has lost what is requested, in which case `start` may
    help, and StoreError if nothing helps.
    """

    @property
    def addresses(self) -> StoreAddresses:
        """Where the leaders of units fetch bodies. The addresses change with each start."""

    async def start(self) -> None:
        """Stop what may be running, and start empty. Raises StoreError, and DeadlineError if the store does not
        serve."""

    async def put(self, step: int, index: int, bodies: Mapping[str, bytes]) -> None:
        """Store the bodies of a row's columns, given by name. They replace those with the same names."""

    async def get(self, step: int, index: int, names: Sequence[str]) -> dict[str, bytes]:
        """Return the bodies of these columns of a row, by name."""

    async def clear(self, step: int, indices: Sequence[int]) -> None:
        """Forget rows."""

    async def close(self) -> None:
        """Stop everything that was started."""


class TransferQueueStore:
    """TransferQueue's storage units, on this machine or on the nodes of a Ray cluster, and the client that uses
    them."""

    def __init__(self, config: Config, folder: Path) -> None:
        """`folder`: the run folder, for the log."""
        self._queue = config.queue
        self._name = f"metronome-{config.run.name}"
        self._limit_s = config.queue.timeout_s
        self._start_s = config.rollout.timeout_s
        self._log = folder / "logs" / "store.log"
        self._starts = 0
        self._child: Child | None = None
        self._client: StoreClient | None = None
        self._addresses: StoreAddresses | None = None

    @property
    def addresses(self) -> StoreAddresses:
        """Where the servers of the last start are listening."""
        assert self._addresses is not None
        return self._addresses

    @property
    def pid(self) -> int:
        """Process id of the process that hosts TransferQueue."""
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """See `ColumnStore.start`. In a cluster, the units start on the nodes that are alive now."""
        await self.close()
        self._starts += 1
        place = Path(hold_lifeline()).parent / f"store-{self._starts}"
        shutil.rmtree(place.parent / f"store-{self._starts - 1}", ignore_errors=True)
        place.mkdir()
        command = store_command(self._queue, self._name, place)
        self._child = Child("the process that hosts TransferQueue", command, self._log)
        self._addresses = await self._wait_for(place / "addresses")
        try:
            name = f"orchestrator-{self._starts}"
            self._client = await StoreClient.connect(self._addresses, name, self._limit_s)
        except StoreFault as fault:
            raise StoreError(f"{fault}; {self._child.name} {self._child.how_it_ended()}") from fault

    async def _wait_for(self, file: Path) -> StoreAddresses:
        assert self._child is not None
        deadline = time.monotonic() + self._start_s
        while not file.exists():
            if not self._child.alive:
                raise StoreError(f"TransferQueue did not start: {self._child.name} {self._child.how_it_ended()}")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"TransferQueue was not ready after rollout.timeout_s = {self._start_s:g} s: {self._child.name} "
                    f"{self._child.how_it_ended()}"
                )
            await asyncio.sleep(0.1)
        addresses = read_addresses(file.read_bytes())
        for one in (addresses.controller, *addresses.units):
            if not self._queue.address and not is_loopback(one.ip):
                raise StoreError(
                    f"TransferQueue's {one.id} listens on {one.ip}, and not on loopback: it has no password"
                )
        return addresses

    async def put(self, step: int, index: int, bodies: Mapping[str, bytes]) -> None:
        """See `ColumnStore`. This and the next two methods raise StoreError if the controller does not answer."""
        await self._call(lambda client: client.put(step, index, bodies))

    async def get(self, step: int, index: int, names: Sequence[str]) -> dict[str, bytes]:
        """See `ColumnStore`."""
        return await self._call(lambda client: client.get(step, index, names))

    async def clear(self, step: int, indices: Sequence[int]) -> None:
        """See `ColumnStore`."""
        await self._call(lambda client: client.clear(step, indices))

    async def _call(self, call: Callable[[StoreClient], Awaitable[T]]) -> T:
        client = self._client
        assert client is not None
        try:
            return await call(client)
        except StoreFault as fault:
            if client is self._client:
                await self._check_controller(client, fault)
            raise
        except asyncio.CancelledError:
            if client is self._client:
                raise
            raise StoreFault("TransferQueue was restarted before it answered") from None

    async def _check_controller(self, client: StoreClient, fault: StoreFault) -> None:
        """Raise StoreError unless the controller answers, because without it no row can be found."""
        try:
            await client.check()
        except StoreFault as error:
            assert self._child is not None
            raise StoreError(
                f"TransferQueue's controller has not answered within queue.timeout_s = {self._limit_s:g} s, so the "
                f"groups in its storage units can't be found ({fault}). {self._child.name} "
                f"{self._child.how_it_ended()}. --resume begins the step again, with a new TransferQueue"
            ) from error

    async def close(self) -> None:
        """Stop all processes. A cluster ends those on its nodes as soon as the process here has ended."""
        if self._client is not None:
            client = self._client
            self._client = None
            client.close()
        if self._child is not None:
            await asyncio.to_thread(self._child.stop, 0.0, signal.SIGKILL)  # Ray answers SIGTERM with a stack trace
            self._child = None


@asynccontextmanager
async def starting_store(config: Config, folder: Path) -> AsyncIterator[asyncio.Task[TransferQueueStore] | None]:
    """Start the store that `queue.store` names in the background, and close it when the `async with` body ends. Yields
    None for the orchestrator's own memory."""
    if config.queue.store == "orchestrator":
        yield None
        return
    store = TransferQueueStore(config, folder)

    async def start() -> TransferQueueStore:
        await store.start()
        return store

    starting = asyncio.create_task(start())
    try:
        yield starting
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await store.close()
