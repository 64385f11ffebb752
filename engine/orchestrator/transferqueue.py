"""TransferQueue as the store of columns: its controller and storage units are Ray actors, which a process of their own
hosts.

A row of TransferQueue is a row of the plane: its partition is the step, its key the group's index, and its fields are
the column bodies, each of which can be fetched alone. A unit or controller that does not answer, or has lost a row,
ends the attempt by name, and the run resumes from its checkpoint.

The process: `python -m engine.orchestrator.transferqueue --name NAME --addresses FILE (--folder DIR | --address
HOST:PORT)`. With a folder, it starts Ray on loopback, with its files in that folder. Ray's processes belong to this
process's group and end with it. With an address, it joins a running cluster, and starts a unit on each node of the run,
or on all nodes if Ray does not place the run. It owns these actors: Ray ends them when it ends, however it ends, and
the cluster goes on. Once all servers are ready, it writes their addresses to FILE and waits to be ended.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Container, Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.config import Config
from engine.errors import DeadlineError, StoreError
from engine.run.commands import STORE_NODES, store_command
from engine.run.files import write_atomically
from engine.run.process import Child, hold_lifeline, watch_lifeline
from engine.wire.access_token import is_loopback
from engine.wire.columns import GENERATED, Column, Row
from engine.wire.routes import ROUTES

T = TypeVar("T")


class StoreServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One TransferQueue process."""

    id: str
    ip: str
    ports: dict[str, int]
    """Ports by TransferQueue's name of the socket."""
    node: str = ""
    """Ray's id of the node."""


class StoreAddresses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All TransferQueue processes."""

    controller: StoreServer
    units: tuple[StoreServer, ...]
    """The storage units, in the order in which rows are distributed over them."""


class TransferQueueStore:
    """TransferQueue's storage units, on this machine or on the nodes of a Ray cluster, and the client that uses them
    (`ColumnStore`).

    It has the columns of the stage `generate`. Scores, and what further stages write, are small and stay in the table.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        """`folder`: the run folder, for the log."""
        self._queue = config.queue
        self._name = f"metronome-{config.run.name}"
        self._limit_s = config.store_timeout_s
        self._start_s = config.rollout.timeout_s
        self._log = folder / "logs" / "store.log"
        self._child: Child | None = None
        self._client: Any = None
        self._stored: dict[int, set[int]] = {}
        """By step: indices of the rows that are in the store."""
        self._over: list[tuple[int, set[int]]] = []
        """Steps that are over, and the indices of their rows, which are still in the store."""
        self._clearing = asyncio.Lock()

    @property
    def pid(self) -> int:
        """Process id of the process that hosts TransferQueue."""
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """Start the servers, in a cluster on the nodes that are alive now. Raises StoreError, and DeadlineError if they
        do not serve within rollout.timeout_s."""
        place = Path(hold_lifeline()).parent / "store"  # short: it holds Ray's sockets
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        self._child = Child(
            "the process that hosts TransferQueue", store_command(self._queue, self._name, place), self._log
        )
        addresses = await self._wait_for(place / "addresses")
        await asyncio.to_thread(_load)  # needs no server, but takes many seconds on a busy machine
        what = f"to connect with {len(addresses.units)} storage units"
        self._client = await self._within(what, asyncio.to_thread(_connect, addresses, "orchestrator"))

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
        addresses = msgspec.json.decode(file.read_bytes(), type=StoreAddresses)
        for one in (addresses.controller, *addresses.units):
            if not self._queue.address and not is_loopback(one.ip):
                raise StoreError(
                    f"TransferQueue's {one.id} listens on {one.ip}, and not on loopback: it has no password"
                )
        return addresses

    async def put_columns(self, row: Row) -> Row:
        """See `ColumnStore`."""
        await self._clear()
        columns = row.only((*GENERATED, ROUTES)).columns
        if not columns:
            return row
        names = [column.name for column in columns]
        await self._within(f"to keep {_title(row, names)}", self._put(row, columns))
        self._stored.setdefault(row.step, set()).add(row.index)
        return row.with_columns([Column(column.name, column.digest, b"") for column in columns])

    async def get_columns(self, rows: Sequence[Row]) -> list[Row]:
        """See `ColumnStore`."""
        return list(await asyncio.gather(*map(self._whole, rows)))

    async def _whole(self, row: Row) -> Row:
        away = [column for column in row.columns if not column.body]
        if not away:
            return row
        names = [column.name for column in away]
        bodies = await self._within(f"to return {_title(row, names)}", self._get(row, names))
        found = [Column(column.name, column.digest, bodies[column.name]) for column in away]
        for column in found:
            if not column.is_whole:
                raise StoreError(
                    f"TransferQueue's bytes of {_title(row, [column.name])} differ from those that were stored"
                )
        return row.with_columns(found)

    def clear_step(self, step: int) -> None:
        """See `ColumnStore`."""
        if indices := self._stored.pop(step, None):
            self._over.append((step, indices))

    async def _clear(self) -> None:
        async with self._clearing:  # a step may begin again: its old rows go before a new one comes
            while self._over:
                step, indices = self._over[0]
                await self._within(f"to forget {len(indices)} groups of step {step}", self._forget(step, indices))
                del self._over[0]

    # these do what async_kv_batch_put, async_kv_batch_get and async_kv_clear do, with a given client

    async def _put(self, row: Row, columns: Iterable[Column]) -> None:
        import torch
        from tensordict import TensorDict

        found = await self._rows(row.step, [row.index], create=True)
        fields = {column.name: torch.frombuffer(bytearray(column.body), dtype=torch.uint8) for column in columns}
        await self._client.async_put(TensorDict(fields, batch_size=[]).unsqueeze(0), found)

    async def _get(self, row: Row, names: Sequence[str]) -> dict[str, bytes]:
        found = await self._rows(row.step, [row.index])
        if not found.size:
            raise ValueError("no such row")
        fields = await self._client.async_get_data(found.select_fields(list(names)))
        return {name: bytes(fields[name][0].numpy().tobytes()) for name in names}

    async def _forget(self, step: int, indices: Iterable[int]) -> None:
        found = await self._rows(step, sorted(indices))
        if found.size:
            await self._client.async_clear_samples(found)

    async def _rows(self, step: int, indices: Iterable[int], create: bool = False) -> Any:  # noqa: ANN401
        keys = list(map(str, indices))
        return await self._client.async_kv_retrieve_meta(keys=keys, partition_id=str(step), create=create)

    async def _within(self, what: str, call: Awaitable[T]) -> T:
        """Return the result of `call`. Raises StoreError if it times out or fails with an error of TransferQueue's
        client: for example, the row does not exist."""
        import zmq  # installed only together with TransferQueue

        try:
            async with asyncio.timeout(self._limit_s):
                return await call
        except (TimeoutError, RuntimeError, ValueError, LookupError, zmq.ZMQError) as error:
            assert self._child is not None
            late = f"did not answer within {self._limit_s:g} s (train.timeout_s / 20)"
            how = late if isinstance(error, TimeoutError) else f"failed: {error}"
            raise StoreError(
                f"TransferQueue was asked {what}, and {how}. {self._child.name} {self._child.how_it_ended()}. --resume "
                "begins the step again, with a new TransferQueue"
            ) from error

    async def close(self) -> None:
        """Stop all processes. A cluster ends those on its nodes as soon as the process here has ended."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._child is not None:
            await asyncio.to_thread(self._child.stop, 0.0, signal.SIGKILL)  # Ray answers SIGTERM with a stack trace
            self._child = None


def _title(row: Row, names: Iterable[str]) -> str:
    return f"the columns {', '.join(names)} of group {row.index}, step {row.step}"


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


# the process that hosts the servers -----------------------------------------------------------------

LOOPBACK = "127.0.0.1"
LEAST_UNITS = 2
"""Number of storage units on a single node."""


def listen_on_loopback() -> None:
    """Have TransferQueue's servers, which have no passwords, listen on loopback. They ask Ray for the address, and a
    Ray worker answers with the machine's address, even if Ray was started on loopback."""
    import ray.util

    ray.util.get_node_ip_address = lambda: LOOPBACK


OBJECT_STORE = 80_000_000
"""Size in bytes of Ray's object store, near the minimum that Ray accepts. No column passes through it."""
SETTINGS = {
    # Ray's servers require a token; without ours, Ray would write one into the user's home
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray starts its workers at niceness 15, and on a busy machine they would not answer for minutes
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "120",
}
"""Environment variables for a Ray that this process starts."""


def main() -> int:
    """Start everything, write the addresses, and wait for a signal."""
    watch_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--addresses", type=Path, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", type=Path)
    where.add_argument("--address")
    arguments = parser.parse_args()
    if not arguments.address:  # Ray starts here, on loopback, whatever cluster RAY_ADDRESS names
        os.environ |= SETTINGS | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray  # it reads its settings at import

    here = {
        "_node_ip_address": LOOPBACK,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE,
        "_temp_dir": str(arguments.folder),
        "runtime_env": {"worker_process_setup_hook": "engine.orchestrator.transferqueue.listen_on_loopback"},
    }
    ray.init(
        address=arguments.address or "local",
        namespace=arguments.name,
        log_to_driver=False,
        **({} if arguments.address else here),
    )
    actors, addresses = _start()
    write_atomically(arguments.addresses, msgspec.json.encode(addresses).decode())
    signal.pause()
    del actors  # held until here, because Ray ends an actor that nobody holds
    return 0


def _start() -> tuple[list[Any], StoreAddresses]:
    """Start the controller on this node, whose end would end the run anyway, and a unit on each node, but at least
    LEAST_UNITS, on the nodes in turn. Return the actors and their addresses.

    `transfer_queue.init` is not used. Its actors have fixed names, so that all runs of a cluster would share one
    controller, and they request CPUs, for which Ray waits without a limit.
    """
    import ray
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    here = ray.get_runtime_context().get_node_id()
    first = _on(here, TransferQueueController).remote()
    controller = StoreServer(*ray.get(first.__ray_call__.remote(_server)))
    actors = [first]
    servers: list[StoreServer] = []
    dead: dict[str, Exception] = {}
    units = max(LEAST_UNITS, len(_nodes(dead)))
    while len(servers) < units:
        nodes = list(islice(cycle(_nodes(dead)), units - len(servers)))
        if not nodes:
            raise next(iter(dead.values()))
        started = [(node, _on(node, SimpleStorageUnit).remote(config={})) for node in nodes]
        asked = [(node, unit, unit.__ray_call__.remote(_server)) for node, unit in started]
        for node, unit, answer in asked:
            try:
                servers.append(StoreServer(*ray.get(answer)))
                actors.append(unit)
            except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError) as error:
                dead[node] = error  # it died, and Ray has not noticed before
    return actors, StoreAddresses(controller, tuple(servers))


def _nodes(dead: Container[str]) -> list[str]:
    """Return the ids of the nodes that are alive, except those in `dead`: those of the run if there are (STORE_NODES).
    A node without CPUs, such as the head of a cluster on Kubernetes, is not meant for work, and is left out if there
    are others."""
    import ray

    alive = sorted(
        (node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in dead),
        key=lambda node: str(node["NodeID"]),
    )
    own = os.environ.get(STORE_NODES, "").split(",")
    alive = [node for node in alive if node["NodeID"] in own] or alive
    working = [node for node in alive if node["Resources"].get("CPU")]
    return [str(node["NodeID"]) for node in working or alive]


def _on(node: str, kind: Any) -> Any:  # noqa: ANN401
    """Return an actor class that starts on this node only, without a CPU reserved for it. A soft affinity is not
    enough: with it, Ray 2.60 starts actors on other nodes even though this one is alive."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return kind.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))


def _server(actor: Any) -> tuple[str, str, dict[str, int], str]:  # noqa: ANN401
    """Return the fields of an actor's `StoreServer`. This runs in the actor's process, which may lack this package."""
    import ray

    info = actor.get_zmq_server_info()
    ports = {str(name): int(port) for name, port in info.ports.items()}
    return str(info.id), str(info.ip), ports, ray.get_runtime_context().get_node_id()


if __name__ == "__main__":
    sys.exit(main())
