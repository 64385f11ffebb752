"""Checkpoints as folders of files: their names, their markers, and which ones are kept. Needs neither ranks nor
tensors.

The marker is written last and names every file with its size. Readers trust a folder only if it has a marker and every
file has the size given there. The marker has a checksum of itself, which is compared whenever it is read, and of each
file, which is compared when the checkpoint is loaded: XXH3 for the tensors (as fast as a disk reads), and SHA-256 for
the small files, because the index in Megatron's format is a pickle.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from enum import Enum, EnumType
from pathlib import Path
from typing import Any, TypedDict, cast

import xxhash

from engine.errors import DamagedCheckpointError
from engine.run.files import open_sealed, parse_object, seal, sync_all, sync_folder, write_json

MARKER = "_SUCCESS.json"
INDEX = ".metadata"
"""Name of Megatron's (torch's) index of the tensors in the files."""
STATE = "state.json"
"""Name of the file that describes the tensors: step, config, model, position in the prompts."""
DATA = ".distcp"
"""Suffix of the files with the tensors."""
DAMAGED = "damaged-"
"""Prefix in the name of a damaged checkpoint that is kept aside."""
Scores = Mapping[int, float | None]
"""What an evaluation said of a run's weights, by version; None while its result is awaited."""


class Marker(TypedDict):
    """The file that declares a checkpoint complete."""

    step: int
    weight_version: int
    run: str
    """The run's id (`engine.run.identity`)."""
    began: float
    """When the run began, in seconds since the epoch."""
    id: str
    """Identifier of the checkpoint, the same in all its copies."""
    saved_at: float
    figures: dict[str, float]
    """Figures of the step before the checkpoint."""
    files: dict[str, int]
    """Sizes in bytes, by name."""
    sha256: dict[str, str]
    """SHA-256 of the files that hold no tensors, by name."""
    xxh3_128: dict[str, str]
    """XXH3 of the files that hold the tensors, by name."""


PLAIN = {
    ("torch", "Size"), ("torch", "float32"), ("torch", "bfloat16"), ("torch", "float16"), ("torch", "uint8"),
    ("torch.serialization", "_get_layout"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING")),
}  # fmt: skip
"""The only names that an index of tensors may refer to. Reading such a pickle runs no code."""


def folder_of(root: Path, step: int) -> Path:
    """Folder of the checkpoint before step `step` (weight version = step)."""
    return root / f"step-{step:06d}"


def partial_of(folder: Path) -> Path:
    """Folder of a checkpoint while it is being written."""
    return folder.with_name(f".{folder.name}.partial")


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that no reader mistakes it for a valid one. Return its new folder."""
    names = (f"{DAMAGED}{folder.name}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    target = next(path for path in map(folder.with_name, names) if not path.exists())
    folder.rename(target)
    sync_folder(target.parent)
    return target


def find_fault(marker: Marker | None, sizes: Mapping[str, int]) -> str | None:
    """Why files of these sizes (bytes, by name) are not a complete checkpoint; None if they are one."""
    if marker is None:
        return f"{MARKER} is damaged" if MARKER in sizes else f"no {MARKER}"
    for name, size in marker["files"].items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != size:
            return f"{name} has {sizes[name]} bytes, {MARKER} says {size}"
    return None


def parse_marker(text: bytes) -> Marker | None:
    """The marker in the text of its file; None if it does not match its own checksum."""
    return cast("Marker | None", open_sealed(text))


def read_marker(folder: Path) -> Marker | None:
    """The folder's marker, or None if there is none or it is damaged."""
    return parse_marker((folder / MARKER).read_bytes()) if (folder / MARKER).is_file() else None


def _marker_of(folder: Path) -> Marker:
    """The marker of a complete checkpoint. Raises DamagedCheckpointError if it is one no more."""
    if (marker := read_marker(folder)) is None:
        raise DamagedCheckpointError(f"checkpoint {folder}: {MARKER} is missing or damaged")
    return marker


def parse_state(text: bytes, marker: Marker) -> dict[str, Any] | None:
    """The state in the text of STATE; None if the text does not match the checkpoint's marker."""
    return parse_object(text) if hashlib.sha256(text).hexdigest() == marker["sha256"].get(STATE) else None


def fault_of(folder: Path) -> str | None:
    """Why the folder is not a complete checkpoint; None if it is one."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return find_fault(read_marker(folder), sizes)


def is_complete(folder: Path) -> bool:
    """Whether the checkpoint is complete: it has its marker, and every file has the size in the marker."""
    return fault_of(folder) is None


def all_complete(root: Path) -> list[Path]:
    """The complete checkpoints in a root folder, oldest first."""
    return sorted(folder for folder in root.glob("step-*") if is_complete(folder))


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint in a root folder; None if there is none."""
    found = all_complete(root)
    return found[-1] if found else None


def step_of(folder: Path) -> int:
    """The step with which a run continues from this complete checkpoint. Raises DamagedCheckpointError."""
    return _marker_of(folder)["step"]


def incomplete_checkpoints(root: Path) -> dict[Path, str]:
    """Incomplete checkpoints in a root folder, oldest first, each with a sentence that names it and the fault."""
    broken = {folder: fault_of(folder) for folder in (*root.glob("step-*"), *root.glob(".step-*.partial"))}
    names = {folder: folder.name.removeprefix(".").removesuffix(".partial") for folder in broken}
    return {
        folder: f"checkpoint {names[folder]} is incomplete ({broken[folder]}), ignored"
        for folder in sorted(broken, key=lambda folder: names[folder])
        if broken[folder]
    }


def publish_checkpoint(
    partial: Path,
    target: Path,
    step: int,
    figures: Mapping[str, float],
    run: str = "",
    began: float = 0.0,
    fence: Callable[[], None] = lambda: None,
) -> None:
    """Turn a finished folder into a checkpoint: sync its files to the disk, rename it, then write the marker. An
    incomplete checkpoint at `target` is removed.

    `run`: id of the run (`engine.run.identity`), which `began` then. `fence` raises if this process
    may no longer write the run.
    """
    files = sorted(path for path in partial.iterdir() if path.is_file())
    marker: Marker = {
        "step": step,
        "weight_version": step,
        "id": uuid.uuid4().hex,
        "run": run,
        "began": began,
        "saved_at": time.time(),
        "figures": dict(figures),
        "files": {path.name: path.stat().st_size for path in files},
        "sha256": {path.name: _sha256(path) for path in files if path.suffix != DATA},
        "xxh3_128": {path.name: _xxh3(path) for path in files if path.suffix == DATA},
    }
    sync_all(partial)
    shutil.rmtree(target, ignore_errors=True)
    fence()
    partial.rename(target)
    sync_folder(target.parent)
    write_json(target / MARKER, seal(marker))


def rank_checkpoints(steps: Mapping[str, int], scores: Scores) -> list[str]:
    """Names of the evaluated checkpoints, the best first; of equal ones, the newer first. `steps`: their steps."""
    told = {name: (score, step) for name, step in steps.items() if (score := scores.get(step)) is not None}
    return sorted(told, key=lambda name: told[name], reverse=True)


def checkpoints_to_keep(markers: Mapping[str, Marker], last: int, best: int, scores: Scores) -> set[str]:
    """Names of the checkpoints to keep: the `last` newest, the `best` ones by their evaluation and, if any are to be
    kept, those whose evaluation is awaited."""
    steps = {name: marker["step"] for name, marker in markers.items()}
    newest = sorted(steps, key=lambda name: steps[name], reverse=True)
    awaited = [name for name in newest if best and scores.get(steps[name], 0.0) is None]
    return {*newest[:last], *rank_checkpoints(steps, scores)[:best], *awaited}


def prune_checkpoints(root: Path, last: int, best: int, scores: Scores) -> None:
    """Delete complete checkpoints that need not be kept, and incomplete ones older than the newest complete one."""
    markers = {folder.name: _marker_of(folder) for folder in all_complete(root)}
    keep = checkpoints_to_keep(markers, last, best, scores)
    half = [folder for folder in incomplete_checkpoints(root) if markers and folder.name.strip(".") < max(markers)]
    for folder in [*half, *(root / name for name in markers if name not in keep)]:
        (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder)


def check_checkpoint(folder: Path) -> None:
    """Reject a checkpoint whose files differ from its marker, or whose index refers to names outside `PLAIN`.

    Raises DamagedCheckpointError naming the file. Call it before Megatron reads the folder, because Megatron unpickles
    the index. Reads every file once.
    """
    if wrong := find_damage(folder, _marker_of(folder)):
        raise DamagedCheckpointError(f"checkpoint {folder}: {wrong}")
    with (folder / INDEX).open("rb") as file:
        entries = _Plain(file, folder).load().state_dict_metadata
    for name, entry in entries.items():
        if type(entry).__name__ != "TensorStorageMetadata":
            raise DamagedCheckpointError(
                f"checkpoint {folder}: {name} is not a tensor; Metronome's checkpoints have tensors only"
            )


def find_damage(folder: Path, marker: Marker) -> str | None:
    """A sentence that names a file whose checksum differs from the marker; None if all match. Reads every file."""
    small = {INDEX: None, **marker["sha256"]}
    kinds = (("SHA-256", _sha256, small), ("XXH3", _xxh3, marker["xxh3_128"]))
    for kind, checksum, expected in kinds:
        for name in sorted(expected):
            if not (folder / name).is_file() or checksum(folder / name) != expected[name]:
                return f"{name} does not match {MARKER} ({kind} differs)"
    return None


class _Plain(pickle.Unpickler):
    """Reads an index, and rejects names that are not in PLAIN."""

    def __init__(self, file: Any, folder: Path) -> None:  # noqa: ANN401
        super().__init__(file)
        self._folder = folder

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        """The object to which the pickle refers. Raises DamagedCheckpointError if it is not in PLAIN."""
        if (module, name) == ("builtins", "getattr"):
            return self._member
        if (module, name) not in PLAIN:
            raise self._refused(f"{module}.{name}")
        return super().find_class(module, name)

    def _member(self, kind: object, name: object) -> Enum:
        """The member of an enum. Early releases of Python 3.11 pickle it as `getattr` of its class."""
        if isinstance(kind, EnumType) and isinstance(name, str) and name in kind.__members__:
            return kind.__members__[name]  # type: ignore[no-any-return]  # members of any enum
        raise self._refused(f"builtins.getattr of {kind!r}")

    def _refused(self, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"checkpoint {self._folder}: {INDEX} refers to {what}, which no checkpoint of Metronome does; Metronome "
            "did not write it and refuses to read it"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _xxh3(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]
