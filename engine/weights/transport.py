"""Weight sync, the trainer's side: export the policy under Hugging Face names and have every instance load it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.queue.client import ControlClient


class Model(Protocol):
    """What is published."""

    def export(self, dtype: torch.dtype | None = None) -> Iterable[tuple[str, Tensor]]:
        """This pipeline stage's whole tensors under Hugging Face names. A collective of the ranks that share them."""


class Members(Protocol):
    """What the publisher asks of the ranks (engine.trainer.ranks)."""

    exports: bool
    """Whether this rank takes part in the export."""
    writes: bool
    """Whether it writes its pipeline stage's tensors."""
    stage: int

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def from_first(self, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0's result of `act` on every rank."""


class FileTransport:
    """Safetensors files in a folder that trainer and instances share (shared memory on one machine).

    One file per pipeline stage, written by the ranks that hold it. The files of the newest version stay: they are the
    snapshot from which an instance can load without the trainer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _place(self, version: int) -> Path:
        return self.folder / f"version-{version:08d}"

    def write(self, tensors: Iterable[tuple[str, Tensor]], version: int, stage: int) -> None:
        """Write a stage's tensors."""
        partial = self._place(version).with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), partial / f"stage-{stage:03d}.safetensors")

    def complete(self, version: int) -> dict[str, str]:
        """All stages are written: make the version visible. Returns what the instances' /update_weights needs to know."""
        place = self._place(version)
        shutil.rmtree(place, ignore_errors=True)
        place.with_suffix(".partial").rename(place)
        for old in self.folder.glob("version-*"):
            if old != place:
                shutil.rmtree(old)
        return {"path": str(place)}


class Publisher:
    """Publishes weight versions; the launcher's pool leads the instances through pause, load and resume."""

    def __init__(self, control: ControlClient, ranks: Members, transport: FileTransport, dtype: torch.dtype) -> None:
        """`dtype`: of the instances' weights."""
        self._dtype = dtype
        self._control = control
        self._ranks = ranks
        self._transport = transport

    def publish(self, model: Model, version: int) -> float:
        """Return once every instance holds exactly this version. Returns the seconds it took (exposed sync).

        A collective of all ranks.
        """
        started = time.perf_counter()
        if self._ranks.exports:
            tensors = model.export(self._dtype)
            if self._ranks.writes:
                self._transport.write(tensors, version, self._ranks.stage)
            else:
                for _ in tensors:
                    pass  # gives its shards to the rank that writes
        self._ranks.barrier()
        self._ranks.from_first(
            lambda: self._control.ask("publish", version=version, info=self._transport.complete(version))
        )
        return time.perf_counter() - started
