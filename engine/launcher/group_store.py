"""Where the bodies of sealed groups lie between the last response and the lease: in TransferQueue's storage units.

This is TransferQueue as a store of keys and values, with a deadline around every call: one row is one sealed group, its
key the group's index, its partition the step. Who has leased and trained a group is the sample queue's business.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import zmq

from engine.config import Config
from engine.errors import DeadlineError, MetronomeError, StoreError
from engine.run.commands import store_command
from engine.run.process import Child, hold_lifeline
from engine.wire.access_token import is_loopback
from engine.wire.store_addresses import StoreAddresses, StoreServer, read_addresses

T = TypeVar("T")
FIELD = "body"
"""The only column."""


class StoreFault(MetronomeError):
    """A storage unit does not answer, or has lost a row; the store must be started again."""


class TransferQueueStore:
    """TransferQueue's processes, and the client that asks them."""

    def __init__(self, config: Config, folder: Path) -> None:
        """`folder`: that of the run, for the log."""
        self._units = config.queue.units
        self._limit_s = config.queue.timeout_s
        self._start_s = config.rollout.timeout_s
        self._log = folder / "logs" / "store.log"
        self._starts = 0
        self._child: Child | None = None
        self._client: Any = None

    @property
    def pid(self) -> int:
        """Process id of the process that hosts TransferQueue."""
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """End what may run, and start with empty units. Raises StoreError, and DeadlineError if they don't serve."""
        await self.close()
        self._starts += 1
        place = Path(hold_lifeline()).parent / f"store-{self._starts}"
        shutil.rmtree(place.parent / f"store-{self._starts - 1}", ignore_errors=True)
        place.mkdir()
        self._child = Child("the process that hosts TransferQueue", store_command(self._units, place), self._log)
        addresses = await self._wait_for(place / "addresses")
        try:
            async with asyncio.timeout(self._limit_s):
                self._client = await asyncio.to_thread(_connect, addresses, self._starts)
        except TimeoutError as error:
            raise DeadlineError(
                f"waited queue.timeout_s = {self._limit_s:g} s for the client of TransferQueue to connect with "
                f"{len(addresses.units)} storage units; {self._child.name} {self._child.how_it_ended()}"
            ) from error

    async def _wait_for(self, file: Path) -> StoreAddresses:
        assert self._child is not None
        deadline = time.monotonic() + self._start_s
        while not file.exists():
            if not self._child.alive:
                raise StoreError(f"TransferQueue did not start: {self._child.name} {self._child.how_it_ended()}")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"TransferQueue does not serve after rollout.timeout_s = {self._start_s:g} s: {self._child.name} "
                    f"{self._child.how_it_ended()}"
                )
            await asyncio.sleep(0.1)
        addresses = read_addresses(file.read_bytes())
        for one in (addresses.controller, *addresses.units):
            if not is_loopback(one.ip):
                raise StoreError(
                    f"TransferQueue's {one.id} listens on {one.ip}, and not on loopback: it has no password"
                )
        return addresses

    async def put(self, step: int, index: int, body: bytes) -> None:
        """Keep the body of a group. Raises StoreFault, and StoreError if the controller does not answer."""
        await self._call(f"to keep group {index} of step {step}", lambda client: _put(client, step, index, body))

    async def get(self, step: int, index: int) -> bytes:
        """Return the body of a group. Raises StoreFault, and StoreError if the controller does not answer."""
        return await self._call(f"to return group {index} of step {step}", lambda client: _get(client, step, index))

    async def clear(self, step: int, indices: Iterable[int]) -> None:
        """Forget groups. Raises StoreFault, and StoreError if the controller does not answer."""
        keys = list(map(str, indices))
        await self._call(f"to forget {len(keys)} groups of step {step}", lambda client: _clear(client, step, keys))

    async def _call(self, what: str, call: Callable[[Any], Awaitable[T]]) -> T:
        client = self._client
        try:
            async with asyncio.timeout(self._limit_s):
                return await call(client)
        except TimeoutError as error:
            fault = f"waited queue.timeout_s = {self._limit_s:g} s for TransferQueue {what}"
            await self._check_controller(client, fault)
            raise StoreFault(fault) from error
        except (RuntimeError, ValueError, zmq.ZMQError) as error:  # as its client raises for a row that is not there
            fault = f"TransferQueue failed {what}: {error}"
            await self._check_controller(client, fault)
            raise StoreFault(fault) from error
        except asyncio.CancelledError:
            if client is self._client:
                raise
            raise StoreFault(f"TransferQueue was started again before it came {what}") from None

    async def _check_controller(self, client: Any, fault: str) -> None:  # noqa: ANN401
        """Raise StoreError unless the controller answers: without it no row can be found."""
        if client is not self._client:
            return  # the store was started again meanwhile
        try:
            async with asyncio.timeout(self._limit_s):
                await client.async_kv_list(None)
        except (TimeoutError, RuntimeError, zmq.ZMQError) as error:
            assert self._child is not None
            raise StoreError(
                f"TransferQueue's controller has not answered within queue.timeout_s = {self._limit_s:g} s, so the "
                f"groups in its storage units can't be found ({fault}). {self._child.name} "
                f"{self._child.how_it_ended()}. --resume begins the step again, with a new TransferQueue"
            ) from error

    async def close(self) -> None:
        """End all processes."""
        if self._client is not None:
            client = self._client
            self._client = None
            client.close()
        if self._child is not None:
            await asyncio.to_thread(self._child.stop, 0.0, signal.SIGKILL)  # Ray answers SIGTERM with a stack trace
            self._child = None


@asynccontextmanager
async def starting_store(config: Config, folder: Path) -> AsyncIterator[asyncio.Task[TransferQueueStore] | None]:
    """Start the store that `queue.store` names, in the background, and end it when the body is left; None for the
    launcher's own memory."""
    if config.queue.store == "launcher":
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


def _connect(addresses: StoreAddresses, number: int) -> Any:  # noqa: ANN401
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TQ_NUM_THREADS", "1")  # it would warn of more in each call
    from transfer_queue.client import AsyncTransferQueueClient
    from transfer_queue.utils.enum_utils import Role
    from transfer_queue.utils.zmq_utils import ZMQServerInfo

    def server(one: StoreServer, role: Any) -> Any:  # noqa: ANN401
        return ZMQServerInfo(role=role, id=one.id, ip=one.ip, ports=one.ports)

    client = AsyncTransferQueueClient(f"metronome-{number}", server(addresses.controller, Role.CONTROLLER))
    units = {one.id: server(one, Role.STORAGE) for one in addresses.units}
    client.initialize_storage_manager("SimpleStorage", {"zmq_info": units})
    return client


# the bodies of async_kv_batch_put, async_kv_batch_get and async_kv_clear, for a client of one's own


async def _put(client: Any, step: int, index: int, body: bytes) -> None:  # noqa: ANN401
    import torch
    from tensordict import TensorDict

    found = await client.async_kv_retrieve_meta(keys=[str(index)], partition_id=str(step), create=True)
    row = torch.frombuffer(bytearray(body), dtype=torch.uint8).unsqueeze(0)
    await client.async_put(TensorDict({FIELD: row}, batch_size=[1]), found)


async def _get(client: Any, step: int, index: int) -> bytes:  # noqa: ANN401
    found = await client.async_kv_retrieve_meta(keys=[str(index)], partition_id=str(step), create=False)
    if not found.size:
        raise ValueError("no such row")
    row = (await client.async_get_data(found.select_fields([FIELD])))[FIELD]
    return bytes(row[0].numpy().tobytes())


async def _clear(client: Any, step: int, keys: list[str]) -> None:  # noqa: ANN401
    found = await client.async_kv_retrieve_meta(keys=keys, partition_id=str(step), create=False)
    if found.size:
        await client.async_clear_samples(found)
