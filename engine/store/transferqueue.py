"""The process that starts TransferQueue: its controller and storage units, as Ray actors.

`python -m engine.store.transferqueue --name NAME --addresses FILE (--folder DIR | --address HOST:PORT)`

With a folder, it starts Ray on loopback, with its files in that folder. Ray's processes belong to this process's group
and end with it. With an address, it joins a running cluster, and starts a unit on each node
of the run, or on all nodes if Ray does not place the run. This process owns these
actors: Ray ends them when it ends, however it ends, and the cluster goes on.

Once all servers are ready, it writes their addresses to FILE (`engine.wire.store_addresses`) and waits to be ended.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Container
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from engine.run.commands import STORE_NODES
from engine.run.files import write_atomically
from engine.run.process import watch_lifeline
from engine.wire.store_addresses import StoreAddresses, StoreServer, pack_addresses

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
    if arguments.address:
        _join(arguments.address, arguments.name)
    else:
        _begin(arguments.folder, arguments.name)
    actors, addresses = _start()
    write_atomically(arguments.addresses, pack_addresses(addresses).decode())
    signal.pause()
    del actors  # held until here, because Ray ends an actor that nobody holds
    return 0


def _begin(folder: Path, name: str) -> None:
    """Start Ray on loopback, ignoring any cluster in RAY_ADDRESS."""
    os.environ |= SETTINGS | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray

    ray.init(
        address="local",
        namespace=name,
        _node_ip_address=LOOPBACK,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE,
        _temp_dir=str(folder),
        runtime_env={"worker_process_setup_hook": "engine.store.transferqueue.listen_on_loopback"},
    )


def _join(address: str, name: str) -> None:
    """Join a running cluster."""
    import ray

    ray.init(address=address, namespace=name, log_to_driver=False)


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
