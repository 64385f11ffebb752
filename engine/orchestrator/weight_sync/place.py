"""Where weights lie on their way to the instances."""

from __future__ import annotations

import shutil
from pathlib import Path

from engine.config import Config


def weights_folder(config: Config, scratch: Path, run_folder: Path) -> Path:
    """The folder for weights on their way to instances.

    It lies in `scratch`, that of the lifeline (in shared memory, where there is any), if twice the space of two
    versions is free there and the run has one node; else in the run folder.
    """
    needed = sum(path.stat().st_size for path in Path(config.model.path).glob("*.safetensors"))
    roomy = shutil.disk_usage(scratch).free > 4 * needed and config.parallel.nodes == 1
    return (scratch if roomy else run_folder) / "weights"
