"""The devices of the cluster as global concurrency limits, one for each kind. A run takes all the devices that it needs
at once, or waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path

from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency

from engine.config import Config, placing
from engine.errors import BadInput, DeadlineError
from tasks.cluster.local_server import OWN

NPUS = "ascend-npus"
"""Name of the limit of NPUs; `metronome deploy --npus N` creates it."""
CUDA_DEVICES = "cuda-devices"
"""The same for CUDA devices: `--cuda-devices N`, or the devices of the machine that deploys first."""
CPU_SLOTS = "cpu-slots"
"""The same for runs on a CPU, each of which takes one: `--cpu-slots N`."""
OPTIONS = {NPUS: "--npus", CUDA_DEVICES: "--cuda-devices", CPU_SLOTS: "--cpu-slots"}
"""Options of `metronome deploy` by limit."""
UNCOUNTED = {CUDA_DEVICES: "CUDA devices", CPU_SLOTS: "runs on a CPU"}
"""What is not counted while its limit does not exist. Runs on NPUs are refused then, unless the server is their own."""
LEASE_S = 120.0
"""Seconds after which the NPUs of a killed run are free again; Prefect's default is 300 s. A living run renews its
lease every 90 s, with three attempts within a few seconds. If the server answers none of them, the run loses its lease.
"""
TOO_MANY = 422
"""HTTP status of Prefect's server for a request of more slots than the limit has in total."""
NPU_MANAGER = Path("/dev/davinci_manager")
"""Device file of Ascend's driver."""
CUDA_FILES = Path("/dev")
"""Folder of NVIDIA's device files, nvidia0 and so on."""


def count_devices(config: Config, pool_instances: int = 0, training: bool = True) -> tuple[int, str]:
    """How many slots of which limit a run holds: NPUs or CUDA devices for its trainer ranks, scorers and rollout
    instances, or for its evaluations if these need more; one on a CPU.

    A run on CUDA holds at least the devices that its nodes show it, because it takes them from the first on: two runs
    on one machine would share device 0. `pool_instances`: instances on the rollout pool. Without `training`, the run
    only evaluates. An evaluation without any instance starts one itself (engine.orchestrator.rollout_service). None
    with cluster.engine = "ray", because Ray counts the devices; instances on the rollout pool are then refused.
    """
    if config.cluster.engine == "ray":
        if pool_instances:
            raise BadInput(
                f'on_rollout_pool = {pool_instances}: with cluster.engine = "ray" the cluster has the instances; set '
                "rollout.instances"
            )
        return 0, CPU_SLOTS
    device = config.platform.device
    if device == "auto":
        device = "npu" if NPU_MANAGER.exists() else "cuda" if visible_cuda_devices() else "cpu"
    if device == "cpu":
        return 1, CPU_SLOTS
    instances = config.rollout.instances + pool_instances
    tensor = config.rollout.tensor
    needed = max(1, instances) * tensor
    if training:
        needed = max(needed, placing.count_devices(config, instances))
    if device == "npu":
        return needed, NPUS
    return max(needed, visible_cuda_devices() * (config.parallel.nodes if training else 1)), CUDA_DEVICES


def visible_cuda_devices() -> int:
    """The number of CUDA devices of this machine that a process may use, without loading CUDA: of its
    CUDA_VISIBLE_DEVICES those before the first that is none (-1 hides all)."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len(list(CUDA_FILES.glob("nvidia[0-9]*")))
    if chosen is None:
        return there
    named = (one.strip() for one in chosen.split(","))
    return min(there, len(list(takewhile(lambda one: one and not one.startswith("-"), named))))


@contextmanager
def hold_devices(count: int, limit: str = NPUS, wait_s: float = 86400.0) -> Iterator[None]:
    """Hold `count` slots of a limit during the body. They are all taken at once, so two runs cannot block each other.

    A run that loses its lease is ended, because two runs on one device would both fail. CUDA devices and CPU slots are
    not counted if their limit does not exist, and nothing is on a server that this process has started; 0 slots need
    none. Raises DeadlineError after `wait_s`, by default a day, and BadInput if the limit is less than `count` or, for
    NPUs, does not exist.
    """
    if not count:
        yield
        return
    slots = concurrency(limit, occupy=count, timeout_seconds=wait_s, strict=True, lease_duration=LEASE_S)
    with ExitStack() as stack:
        try:
            stack.enter_context(slots)
        except TimeoutError:
            raise DeadlineError(f"{count} slots of the limit {limit} were not free within {wait_s:.0f} s") from None
        except ConcurrencySlotAcquisitionError as error:
            _explain(error, count, limit)
        yield


def _explain(error: ConcurrencySlotAcquisitionError, count: int, limit: str) -> None:
    """Raise what kept a run from its slots. Return if they need not be counted, since nobody has made the limit."""
    option = OPTIONS.get(limit, "OPTION")
    if error.__cause__ is None:  # the server has answered, so the limit does not exist
        if limit in UNCOUNTED or os.environ.get("PREFECT_API_URL") in OWN:
            return
        raise BadInput(
            f"Prefect has no limit {limit}, of which this run takes {count}: create it by `metronome deploy {option} "
            "N`, where N is the number of devices of the cluster"
        ) from None
    if getattr(getattr(error.__cause__, "response", None), "status_code", None) != TOO_MANY:
        raise error
    raise BadInput(
        f"this run needs {count} slots of Prefect's limit {limit}, which has fewer in total: use fewer ranks "
        f"and instances, or raise the limit by `metronome deploy {option} N` if the cluster has more devices"
    ) from None
