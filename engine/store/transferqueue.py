"""The process that hosts TransferQueue: Ray on loopback, and in it TransferQueue's controller and storage units.

`python -m engine.store.transferqueue --units N --folder DIR --addresses FILE`

Once all serve, it writes where they listen to FILE (`engine.wire.store_addresses`), and waits to be ended. Ray's
processes are of this process's group, which ends with it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

from engine.run.files import write_atomically
from engine.run.process import watch_lifeline
from engine.store.loopback import LOOPBACK
from engine.wire.store_addresses import StoreAddresses, StoreServer, pack_addresses

CPUS = 8
"""CPUs that Ray is told of. Each storage unit and the controller wants one, and Ray waits for ever if there is none."""
OBJECT_STORE = 80_000_000
"""Bytes of Ray's own object store, near the least that Ray takes: no group passes through it."""
SETTINGS = {
    # Ray's own servers ask for a token; without one of ours Ray would write one into the user's home
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray starts its workers at niceness 15: on a busy machine they would answer nobody for minutes
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "120",
}
"""Environment of Ray."""


def main() -> int:
    """Start all, say where they listen, and wait for a signal."""
    watch_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("--units", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--addresses", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ |= SETTINGS | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    write_atomically(arguments.addresses, pack_addresses(_start(arguments.units, arguments.folder)).decode())
    signal.pause()
    return 0


def _start(units: int, folder: Path) -> StoreAddresses:
    import ray
    import transfer_queue
    from omegaconf import OmegaConf

    ray.init(
        num_cpus=CPUS + units,
        _node_ip_address=LOOPBACK,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE,
        _temp_dir=str(folder),
        runtime_env={"worker_process_setup_hook": "engine.store.loopback.listen_on_loopback"},
    )
    found = transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": units}}}))
    stored = found.backend.SimpleStorage.zmq_info
    return StoreAddresses(_server(found.controller.zmq_info), tuple(_server(stored[name]) for name in stored))


def _server(info: Any) -> StoreServer:  # noqa: ANN401
    return StoreServer(str(info.id), str(info.ip), {str(name): int(port) for name, port in info.ports.items()})


if __name__ == "__main__":
    sys.exit(main())
