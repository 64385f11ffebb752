"""The model of instances on a Ray cluster: a node that does not have the launcher's folder fetches a copy, once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from engine.data.hub import MODEL_FILES
from engine.errors import BadInput, DeadlineError
from engine.run.lock import hold_lock, share_lock
from engine.run.progress import folder_size

PIECE = 16 * 2**20
"""Bytes of a file that are read or fetched at a time."""
PIECE_S = 300.0
"""Seconds in which the launcher's node must send a piece. It sends one at a time, to all nodes."""
UNUSED_S = 7 * 86400.0
"""Seconds after its last use for which a copy is kept."""
ONCE = ".once"
"""Ends the name of a copy of an evaluated policy, of which no later evaluation wants one: the next fetch removes it."""
FETCH = ".fetch"
LOCK = ".lock"

Digests = Mapping[str, str]
"""The xxh3_128 of each file of a model, by its name."""


def find_digests(folder: Path) -> dict[str, str]:
    """The digests of a model folder. Raises BadInput if a file can't be read."""
    found = {file.name: file for pattern in MODEL_FILES for file in folder.glob(pattern) if file.is_file()}
    digests = {}
    for name, file in sorted(found.items()):
        try:
            digests[name] = _digest(file)
        except OSError as error:
            raise BadInput(f"model {folder}: {name} can't be read: {error.strerror}") from None
    return digests


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
        """Up to PIECE bytes of a file, from an offset on; none at its end. Raises BadInput if the file is gone."""
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(offset)
                return file.read(PIECE)
        except FileNotFoundError:
            raise BadInput(f"{self._folder / name} is gone since the run began") from None


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
    once: bool = False
    """Whether it is evaluated once, so that its copies need not stay."""

    @classmethod
    def of(cls, folder: Path, node: str, once: bool = False) -> PlacedModel:
        """Read a model folder, and start an actor on the launcher's `node`, which ends with this process, and which Ray
        starts again if it dies alone. Raises BadInput as `find_digests`."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=False)
        kind = ray.remote(ModelSource).options(
            num_cpus=0, scheduling_strategy=there, max_restarts=-1, max_task_retries=-1
        )
        source = kind.remote(str(folder.resolve()))
        return cls(folder=str(folder.resolve()), digests=find_digests(folder), node=node, source=source, once=once)

    def hold(self, node: str) -> tuple[Path, ExitStack]:
        """As `model_here`, on a node. Raises DeadlineError if the launcher's sends nothing, and BadInput or OSError if
        it can't."""
        if node == self.node:
            return Path(self.folder), ExitStack()
        return model_here(self.folder, self.digests, self._piece, self.once)

    def _piece(self, name: str, offset: int) -> bytes:
        import ray

        try:
            piece: bytes = ray.get(self.source.piece.remote(name, offset), timeout=PIECE_S)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                f"the node where the run began has not sent {self.folder}/{name} from byte {offset} on within "
                f"{PIECE_S:g} s"
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None  # as if it was raised here
        return piece


def model_here(
    folder: str, digests: Digests, read: Callable[[str, int], bytes], once: bool = False
) -> tuple[Path, ExitStack]:
    """This node's model: the launcher's `folder` if this node sees the same files there, else a copy of them, fetched
    by `read` (as `ModelSource.piece`) unless it is there. What a fetch got before it was interrupted is kept for the
    next one. The copy stays until the ExitStack is closed. `once`: as in `PlacedModel`. Raises BadInput if what arrives
    has other digests."""
    if _same(Path(folder), digests):
        return Path(folder), ExitStack()
    name = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:32]
    place = _copies() / (name + ONCE * once)
    partial = place.with_suffix(".partial")
    what = f"the copy {place} of {folder}"
    with (
        hold_lock(place.with_suffix(FETCH), what, 3600.0, progress=lambda: folder_size(partial)),
        ExitStack() as held,
    ):
        if not _same(place, digests):
            _sweep(place)
            _fetch(folder, place, partial, digests, read)
        os.utime(place)
        held.enter_context(share_lock(place.with_suffix(LOCK), what))
        return place, held.pop_all()


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


def _fetch(folder: str, place: Path, partial: Path, digests: Digests, read: Callable[[str, int], bytes]) -> None:
    """Fetch what this node lacks. An earlier fetch that was interrupted has left files and the beginning of one; a copy
    that was damaged has all of them."""
    if place.is_dir() and not partial.exists():
        place.rename(partial)
    shutil.rmtree(place, ignore_errors=True)
    partial.mkdir(parents=True, mode=0o700, exist_ok=True)
    for name, expected in digests.items():
        file = partial / name
        was_there = file.exists()
        whole = _complete(file, name, expected, read)
        if not whole and was_there:  # what was there is not the beginning of the launcher's
            file.unlink()
            whole = _complete(file, name, expected, read)
        if not whole:
            file.unlink()
            raise BadInput(f"{folder}/{name} has changed since the run began: its digest was {expected}")
    partial.rename(place)


def _complete(file: Path, name: str, expected: str, read: Callable[[str, int], bytes]) -> bool:
    """Fetch what a file lacks at its end. Returns whether it has the expected digest."""
    found = xxhash.xxh3_128()
    with file.open("a+b") as opened:
        opened.seek(0)
        while piece := opened.read(PIECE):
            found.update(piece)
        while found.hexdigest() != expected and (piece := read(name, opened.tell())):
            opened.write(piece)
            found.update(piece)
    return found.hexdigest() == expected


def _sweep(place: Path) -> None:
    """Remove copies that nobody has used for UNUSED_S, and those for ONCE that nobody uses."""
    for other in place.parent.glob("*"):
        if other == place or not _is_spare(other):
            continue
        what = f"the copy {other}"
        with (
            suppress(BadInput),  # an instance has it open, or is about to
            hold_lock(other.with_suffix(FETCH), what, 0.0),
            hold_lock(other.with_suffix(LOCK), what, 0.0),
        ):
            if _is_spare(other):  # still
                shutil.rmtree(other, ignore_errors=True)


def _is_spare(copy: Path) -> bool:
    try:
        return copy.is_dir() and (copy.suffix == ONCE or time.time() - copy.stat().st_mtime >= UNUSED_S)
    except OSError:  # another node of the same home has removed it
        return False
