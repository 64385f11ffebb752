"""The folder for weights on their way to the instances."""

from __future__ import annotations

import shutil
from pathlib import Path

from engine.config import Config
from engine.wire.access_token import is_loopback
from engine.wire.address import split_address


def weights_folder(config: Config, scratch: Path, run_folder: Path, own_trainer: bool = True) -> Path:
    """Return the folder for weights on their way to the instances.

    The folder is in `scratch`, the lifeline's folder (in shared memory if available), if that has free space for twice
    two versions, if the run has one node, and if no trainer of another machine, which sends weights over the network,
    may write the snapshots for late instances. Otherwise it is in the run folder. `own_trainer`: whether the trainer is
    the run's, else it is a service's client.
    """
    host, _ = split_address(config.rollout.listen, "rollout.listen")
    far = not own_trainer and config.weights.transport != "file" and not is_loopback(host)
    if far or config.parallel.nodes > 1:
        return run_folder / "weights"
    needed = sum(path.stat().st_size for path in Path(config.model.path).glob("*.safetensors"))
    roomy = shutil.disk_usage(scratch).free > 4 * needed
    return (scratch if roomy else run_folder) / "weights"
