"""A client that uses TransferQueue as a key-value store, with a deadline for every call.

A row of TransferQueue is a row of the plane: its partition is the step, its key the group's index, and its fields are
the column bodies, each of which can be fetched alone. All fields of a row are in one storage unit, so the loss of a
unit affects only its own rows.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from engine.errors import MetronomeError
from engine.wire.store_addresses import StoreAddresses, StoreServer

T = TypeVar("T")


class StoreFault(MetronomeError):
    """TransferQueue does not answer, or has lost a row."""


class StoreClient:
    """Calls the servers of one start of TransferQueue. It belongs to one event loop."""

    def __init__(self, client: Any, limit_s: float) -> None:  # noqa: ANN401
        """`client`: TransferQueue's client; `limit_s`: seconds that a call may take (Config.store_timeout_s)."""
        self._client = client
        self._limit_s = limit_s

    @staticmethod
    async def connect(addresses: StoreAddresses, name: str, limit_s: float) -> StoreClient:
        """Return a client connected to the servers. Raises StoreFault."""
        await asyncio.to_thread(_load)  # needs no server, but takes many seconds on a busy machine
        connecting = asyncio.to_thread(_connect, addresses, name)
        what = f"to connect with {len(addresses.units)} storage units"
        return StoreClient(await _within(limit_s, what, connecting), limit_s)

    async def put(self, step: int, index: int, bodies: Mapping[str, bytes]) -> None:
        """Store the column bodies of a row, given by name. Raises StoreFault."""
        await _within(self._limit_s, f"to keep {_title(step, index, bodies)}", self._put(step, index, bodies))

    async def get(self, step: int, index: int, names: Sequence[str]) -> dict[str, bytes]:
        """Return the bodies of these columns of a row, by name. Raises StoreFault."""
        return await _within(self._limit_s, f"to return {_title(step, index, names)}", self._get(step, index, names))

    async def clear(self, step: int, indices: Sequence[int]) -> None:
        """Delete rows. Raises StoreFault."""
        await _within(self._limit_s, f"to forget {len(indices)} groups of step {step}", self._clear(step, indices))

    async def check(self) -> None:
        """Raise StoreFault unless the controller answers."""
        await _within(self._limit_s, "to list its rows", self._client.async_kv_list(None))

    def close(self) -> None:
        """Close the sockets. No call may be in progress."""
        self._client.close()

    # these do what async_kv_batch_put, async_kv_batch_get and async_kv_clear do, with a given client

    async def _put(self, step: int, index: int, bodies: Mapping[str, bytes]) -> None:
        import torch
        from tensordict import TensorDict

        found = await self._rows(step, [index], create=True)
        fields = {name: torch.frombuffer(bytearray(body), dtype=torch.uint8) for name, body in bodies.items()}
        await self._client.async_put(TensorDict(fields, batch_size=[]).unsqueeze(0), found)

    async def _get(self, step: int, index: int, names: Sequence[str]) -> dict[str, bytes]:
        found = await self._rows(step, [index])
        if not found.size:
            raise ValueError("no such row")
        fields = await self._client.async_get_data(found.select_fields(list(names)))
        return {name: bytes(fields[name][0].numpy().tobytes()) for name in names}

    async def _clear(self, step: int, indices: Sequence[int]) -> None:
        found = await self._rows(step, indices)
        if found.size:
            await self._client.async_clear_samples(found)

    async def _rows(self, step: int, indices: Iterable[int], create: bool = False) -> Any:  # noqa: ANN401
        keys = list(map(str, indices))
        return await self._client.async_kv_retrieve_meta(keys=keys, partition_id=str(step), create=create)


def _title(step: int, index: int, names: Iterable[str]) -> str:
    return f"the columns {', '.join(names)} of group {index}, step {step}"


async def _within(limit_s: float, what: str, call: Awaitable[T]) -> T:
    """Return the result of `call`. Raises StoreFault if it times out or fails with an error of TransferQueue's
    client."""
    try:
        async with asyncio.timeout(limit_s):
            return await call
    except TimeoutError as error:
        raise StoreFault(f"waited {limit_s:g} s (train.timeout_s / 20) for TransferQueue {what}") from error
    except _faults() as error:  # for example, the row does not exist
        raise StoreFault(f"TransferQueue failed {what}: {error}") from error


def _faults() -> tuple[type[Exception], ...]:
    """Return the errors that TransferQueue's client raises. zmq is imported here because it is installed only together
    with TransferQueue."""
    import zmq

    return RuntimeError, ValueError, LookupError, zmq.ZMQError


def _load() -> None:
    """Import the library, which reads its environment variables at import."""
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TQ_NUM_THREADS", "1")  # with more, it would print a warning in each call
    import transfer_queue.client  # noqa: F401


def _connect(addresses: StoreAddresses, name: str) -> Any:  # noqa: ANN401
    from transfer_queue.client import AsyncTransferQueueClient
    from transfer_queue.utils.enum_utils import Role
    from transfer_queue.utils.zmq_utils import ZMQServerInfo

    def server(one: StoreServer, role: Any) -> Any:  # noqa: ANN401
        return ZMQServerInfo(role=role, id=one.id, ip=one.ip, ports=one.ports)

    client = AsyncTransferQueueClient(name, server(addresses.controller, Role.CONTROLLER))
    units = {one.id: server(one, Role.STORAGE) for one in addresses.units}
    client.initialize_storage_manager("SimpleStorage", {"zmq_info": units})
    return client
