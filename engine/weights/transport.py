"""Weight sync, the trainer's side: export the policy under Hugging Face names and have every instance load it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from engine.queue.client import ControlClient


class FileTransport:
    """Safetensors files in a folder that trainer and instances share (shared memory on one machine).

    The file of the newest version stays: it is the snapshot from which an instance can load without the trainer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def send(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, str]:
        """Write the tensors as one version; returns what the instances' /update_weights needs to know."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"version-{version:08d}.safetensors"
        partial = path.with_suffix(".partial")
        save_file(dict(tensors), partial)
        partial.rename(path)
        for old in self.folder.glob("version-*.safetensors"):
            if old != path:
                old.unlink()
        return {"path": str(path)}


class Publisher:
    """Publishes weight versions; the launcher's pool leads the instances through pause, load and resume."""

    def __init__(self, control: ControlClient, transport: FileTransport) -> None:
        self._control = control
        self._transport = transport

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> float:
        """Return once every instance holds exactly this version. Returns the seconds it took (exposed sync)."""
        started = time.perf_counter()
        info = self._transport.send(tensors, version)
        self._control.ask("publish", version=version, info=info)
        return time.perf_counter() - started
