"""What a run needs of the machine: open files, processes, shared memory, disk space.

The orchestrator compares these needs with the machine's limits before anything starts; `run.dry` does too and shows
both.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import Config
from engine.errors import BadInput
from engine.model.shape import ModelShape
from engine.run.disk import reachable_limit
from engine.run.memory import LOWERED_BY, host_need, is_on_cpu
from engine.run.process import SHARED_MEMORY
from engine.run.progress import format_size

OWN_FILES = 200
"""Open files of the orchestrator other than connections: libraries, logs, pipes, its server. About 60 are used."""
OWN_THREADS = 16
"""Threads of a process other than those that compute: OpenMP's, torch's and the HTTP server's."""
RANK_SHARED = 64 * 2**20
"""Bytes of shared memory per device process of a node that has several, for buffers of the device's collectives and of
vLLM. An allowance, not measured; a container has 64 MiB in total by default."""
UNDER_WAY_S = 20.0
CHECKPOINTS = 2
"""Number of checkpoints for which the disk must have room. A disk that fills up later ends the run with a DiskError,
after which it can be resumed."""
SLOW_DISK = 50 * 2**20
"""Bytes per second at which every disk is taken to write a checkpoint."""
SLOW_READ = 100 * 2**20
"""Bytes per second at which every instance is taken to read its model, from a file system that many share."""
SIZES = {"float32": 4, "bfloat16": 2}
PIDS = Path("/sys/fs/cgroup/pids.max")


@dataclass(frozen=True)
class Limit:
    """A limit of the machine, and what a run needs."""

    what: str
    need: float
    has: float
    unit: str
    formula: str
    remedy: str

    @property
    def suffices(self) -> bool:
        """Whether the machine has what the run needs."""
        return self.need <= self.has

    @property
    def refusal(self) -> str:
        """Why the run cannot start on this machine, and what to do about it. For a limit that does not suffice."""
        return f"{self}; {self.remedy}"

    def __str__(self) -> str:
        return f"{self.what}: the run needs {self._told(self.need)} ({self.formula}), there {self._there()}"

    def _there(self) -> str:
        return "is no limit" if math.isinf(self.has) else f"are {self._told(self.has)}"

    def _told(self, amount: float) -> str:
        return format_size(amount) if self.unit == "bytes" else f"{amount:,.0f}"


def machine_limits(config: Config, parameters: int) -> Iterator[Limit]:
    """The limits of this machine. `parameters`: number of the policy's parameters; 0 if unknown."""
    yield _open_files_limit(config)
    yield Limit(
        what="processes and threads",
        need=count_threads(config),
        has=_process_limit(),
        unit="threads",
        formula="those of ranks, instances and verifiers on this node",
        remedy="raise the limit (ulimit -u, or pids of the container), or lower reward.workers",
    )
    if need := shared_memory(config):
        yield Limit(
            what="shared memory",
            need=need,
            has=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY else 0.0,
            unit="bytes",
            formula=f"{RANK_SHARED // 2**20} MiB for each device process",
            remedy="give the container more (--shm-size)",
        )
    if parameters:
        each = checkpoint_size(config, parameters)
        policy = parameters * SIZES[config.train.dtype]
        place = next(folder for folder in (config.folder, *config.folder.resolve().parents) if folder.exists())
        yield Limit(
            what=f"disk space at {config.run.output} (run.output)",
            need=CHECKPOINTS * each + policy,
            has=shutil.disk_usage(place).free,
            unit="bytes",
            formula=f"{CHECKPOINTS} checkpoints of {format_size(each)}, {format_size(policy)} of the trained policy",
            remedy="free space, or set run.output to another disk",
        )


def memory_limits(config: Config, shape: ModelShape, training: bool = True) -> Iterator[Limit]:
    """The memory of this machine, for a run that computes on its cores; without `training` for an evaluation alone."""
    if not is_on_cpu(config) or config.cluster.engine == "ray":
        return
    need, largest = host_need(shape, config, training)
    keys = [key for key in LOWERED_BY[largest.name] if not key.startswith("parallel.")]  # all ranks are here
    yield Limit(
        what="memory of this machine",
        need=need.total,
        has=need.available,
        unit="bytes",
        formula=", ".join(f"{term.name} {format_size(term.bytes)}" for term in need.terms),
        remedy=f"change {' or '.join(keys)} ({largest.name} of a process: {format_size(largest.bytes)}), or take a "
        "smaller model",
    )


def check_memory(config: Config, shape: ModelShape, training: bool = True) -> None:
    """Raise BadInput if what `memory_limits` counts does not fit."""
    for limit in memory_limits(config, shape, training):
        _check(limit)


def check_limits(config: Config, parameters: int) -> None:
    """Raise BadInput for the first limit that is too low."""
    for limit in machine_limits(config, parameters):
        _check(limit)


def check_open_files(config: Config, instances: int = 0) -> None:
    """Raise BadInput if this process may not open as many files as the config needs. `instances`: number of instances,
    if it is higher than the config's. (An evaluation has no ranks.)"""
    _check(_open_files_limit(config, instances))


def _check(limit: Limit) -> None:
    if not limit.suffices:
        raise BadInput(limit.refusal)


def _open_files_limit(config: Config, instances: int = 0) -> Limit:
    return Limit(
        what="open files",
        need=open_files(config, instances),
        has=reachable_limit(),
        unit="files",
        formula="a connection for each response in flight, and the orchestrator's own",
        remedy="raise the hard limit (ulimit -Hn), or lower rollout.concurrency",
    )


def open_files(config: Config, instances: int = 0) -> int:
    """Largest number of files that the orchestrator has open at once, with the instances that the config expects, or
    with `instances` if they are more. An evaluation during the run may sample more responses for each prompt."""
    expected = config.rollout.instances + config.dry_run.joining
    instances = max(1, instances, expected, config.cluster.most_instances)
    samples = config.evaluate.samples
    in_flight = config.groups_in_flight * max(config.rollout.group_size, samples)
    if samples > config.slots:  # begins where a single slot is free
        in_flight = max(in_flight, config.slots - 1 + samples)
    return instances * in_flight + 4 * instances + 4 * config.reward.workers + OWN_FILES


def count_threads(config: Config) -> int:
    """Processes and threads of the run on the orchestrator's node."""
    ranks = config.parallel.ranks_per_node * (config.trainer_threads + OWN_THREADS)
    scorers = config.scorer_ranks * (config.scorer_threads + OWN_THREADS)
    instances = config.rollout.instances * (config.instance_threads + OWN_THREADS * config.rollout.tensor)
    return ranks + scorers + instances + OWN_THREADS * (config.reward.workers + 3)


def shared_memory(config: Config) -> int:
    """Bytes of shared memory on the orchestrator's node. Weights in transfer do not count, because they go to the run
    folder if there is no room."""
    if config.platform.device not in ("cuda", "npu"):
        return 0
    ranks = sum(count for count in (config.parallel.ranks_per_node, config.scorer_ranks) if count > 1)
    split = config.rollout.instances * config.rollout.tensor if config.rollout.tensor > 1 else 0
    return RANK_SHARED * (ranks + split)


def checkpoint_size(config: Config, parameters: int) -> float:
    """Bytes of a checkpoint: the weights and Adam's two moments in fp32, and the old policy in the training's dtype."""
    old = SIZES[config.train.dtype] if config.algorithm.old_policy == "previous" else 0
    return parameters * (12.0 + old)


def saving_s(config: Config) -> float:
    """Longest time in seconds until a trainer that was told to stop has a whole checkpoint: UNDER_WAY_S for the
    micro-batch under way, and the time that SLOW_DISK takes."""
    return UNDER_WAY_S + checkpoint_size(config, stored_parameters(Path(config.model.path))) / SLOW_DISK


def loading_s(model: Path) -> float:
    """Longest time in seconds that an instance needs to read the safetensors files of a model folder."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) / SLOW_READ


def stored_parameters(model: Path) -> int:
    """Number of parameters in the safetensors files of a model folder. Raises BadInput for a damaged file."""
    return sum(map(_parameters_of, model.glob("*.safetensors")))


def _parameters_of(path: Path) -> int:
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, path.stat().st_size)))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{path}: damaged safetensors file") from None


def _process_limit() -> float:
    own = math.inf if os.geteuid() == 0 else _unlimited(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    group = PIDS.read_text().strip() if PIDS.exists() else "max"
    if group == "max":
        return own
    return min(own, int(group) - int(PIDS.with_name("pids.current").read_text()))


def _unlimited(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit
