"""The model of instances on a Ray cluster: a node that does not have the launcher's folder fetches a copy, once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from engine.data.hub import MODEL_FILES
from engine.errors import BadInput
from engine.run.lock import hold_lock, share_lock

PIECE = 16 * 2**20
"""Bytes of a file that are read or fetched at a time."""
FETCH_S = 3600.0
"""Seconds without another whole file for which an instance waits while another one fetches the same model."""
UNUSED_S = 7 * 86400.0
"""Seconds after its last use for which a copy is kept."""
LOCK = ".lock"

Digests = Mapping[str, str]
"""The xxh3_128 of each file of a model, by its name."""


def find_digests(folder: Path) -> dict[str, str]:
    """The digests of a model folder. Raises OSError."""
    found = {file.name: file for pattern in MODEL_FILES for file in folder.glob(pattern) if file.is_file()}
    return {name: _digest(file) for name, file in sorted(found.items())}


def _digest(file: Path) -> str:
    found = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while piece := opened.read(PIECE):
            found.update(piece)
    return found.hexdigest()


class ModelSource:
    """The launcher's model, an actor on its node, of which the others ask for pieces."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def piece(self, name: str, offset: int) -> bytes:
        """Up to PIECE bytes of a file, from an offset on; none at its end."""
        with (self._folder / name).open("rb") as file:
            file.seek(offset)
            return file.read(PIECE)


@dataclass(frozen=True)
class PlacedModel:
    """A model of the launcher, for other nodes."""

    folder: str
    """Absolute."""
    digests: Digests
    node: str
    """The launcher's."""
    source: Any
    """Its `ModelSource`, an actor."""

    @classmethod
    def of(cls, folder: Path, node: str) -> PlacedModel:
        """Read a model folder, and start an actor on the launcher's `node`, which ends with this process."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=False)
        source = ray.remote(ModelSource).options(num_cpus=0, scheduling_strategy=there).remote(str(folder.resolve()))
        return cls(str(folder.resolve()), find_digests(folder), node, source)

    def hold(self, node: str) -> tuple[Path, AbstractContextManager[None]]:
        """As `model_here`, on a node."""
        import ray

        if node == self.node:
            return Path(self.folder), nullcontext()
        return model_here(self.folder, self.digests, lambda *piece: ray.get(self.source.piece.remote(*piece)))


def model_here(
    folder: str, digests: Digests, read: Callable[[str, int], bytes]
) -> tuple[Path, AbstractContextManager[None]]:
    """This node's model: the launcher's `folder` if this node sees the same files there, else a copy of them, fetched
    by `read` (as `ModelSource.piece`) unless it is there. Also a lock, under which the copy stays. Raises BadInput if
    what arrives has other digests."""
    if _same(Path(folder), digests):
        return Path(folder), nullcontext()
    place = _copies() / hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:32]
    what = f"the copy {place} of {folder}"
    with hold_lock(place.with_suffix(".fetch"), what, FETCH_S, progress=lambda: _fetched(place)):
        if not _same(place, digests):
            _sweep(place)
            _fetch(folder, place, digests, read)
        os.utime(place)
    return place, share_lock(place.with_suffix(LOCK), what)


def _fetched(place: Path) -> int:
    """Number of files that were fetched so far."""
    return len(list(_partial(place).glob("*")))


def _partial(place: Path) -> Path:
    return place.with_suffix(".partial")


def _copies() -> Path:
    """The folder with the copies of this node's user."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "metronome" / "models"


def _same(folder: Path, digests: Digests) -> bool:
    """Whether a folder has the files. Other files there do not matter."""
    try:
        return all(_digest(folder / name) == expected for name, expected in digests.items())
    except OSError:
        return False


def _fetch(folder: str, place: Path, digests: Digests, read: Callable[[str, int], bytes]) -> None:
    partial = _partial(place)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
    partial.mkdir(parents=True, mode=0o700)
    for name, expected in digests.items():
        found = xxhash.xxh3_128()
        with (partial / name).open("wb") as file:
            while piece := read(name, file.tell()):
                file.write(piece)
                found.update(piece)
        if found.hexdigest() != expected:
            raise BadInput(f"{folder}/{name} has changed since the run began: its digest was {expected}")
    partial.rename(place)


def _sweep(place: Path) -> None:
    """Remove copies that nobody has used for UNUSED_S."""
    for other in place.parent.glob("*"):
        if other == place or not other.is_dir() or time.time() - other.stat().st_mtime < UNUSED_S:
            continue
        try:
            with hold_lock(other.with_suffix(LOCK), f"the copy {other}", 0.0):
                shutil.rmtree(other, ignore_errors=True)
        except BadInput:  # an instance has it open
            continue
