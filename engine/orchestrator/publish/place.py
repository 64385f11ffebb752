"""The folder for weights on their way to the instances."""

from __future__ import annotations

import shutil
from pathlib import Path

from engine.config import Config


def weights_folder(config: Config, scratch: Path, run_folder: Path) -> Path:
    """Return the folder for weights on their way to the instances, with transport "file".

    The folder is in `scratch`, the lifeline's folder (in shared memory if available), if that has free space for two
    versions and the run has one node. Otherwise it is in the run folder.
    """
    needed = sum(path.stat().st_size for path in Path(config.model.path).glob("*.safetensors"))
    roomy = config.parallel.nodes == 1 and shutil.disk_usage(scratch).free > 2 * needed
    return (scratch if roomy else run_folder) / "weights"
