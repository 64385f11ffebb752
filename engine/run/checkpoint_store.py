"""Checkpoints in `checkpoint.path`, which is a folder or an s3:// address. Files are written first, the marker last.

Any file system of fsspec should work; folders and s3:// are tested.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import botocore.exceptions
import fsspec
from fsspec.implementations.local import LocalFileSystem

from engine.config import Config
from engine.errors import CheckpointError, DamagedCheckpointError
from engine.run.checkpoint_files import (
    DAMAGED,
    MARKER,
    Marker,
    Scores,
    all_complete,
    check_checkpoint,
    checkpoints_to_keep,
    find_damage,
    find_fault,
    incomplete_checkpoints,
    parse_marker,
    partial_of,
    read_marker,
    set_aside,
    step_of,
)
from engine.run.files import seal, sync_all, sync_folder, write_json


def place_of(config: Config) -> str:
    """The place where the run publishes its checkpoints: `<checkpoint.path>/<run.name>`, or "" if they stay in the run
    folder."""
    return f"{config.checkpoint.path.rstrip('/')}/{config.run.name}" if config.checkpoint.path else ""


def upload_checkpoint(
    checkpoint: Path,
    place: str,
    beside: Mapping[str, Path] | None = None,
    fence: Callable[[], None] = lambda: None,
    sent: Callable[[int], None] = lambda size: None,
) -> None:
    """Copy a complete checkpoint, and further files `beside` (by name), to a folder or URL.

    An existing marker is removed first. If it belongs to this checkpoint, the files that it names are not copied again.
    The new marker is written when the place lists every file with its size. A failure never leaves an incomplete
    checkpoint that looks complete. `fence` raises if this process may no longer write the run; it is called before each
    change. `sent` gets the number of bytes of each part that has arrived. Raises CheckpointError naming the place, also
    instead of overwriting a checkpoint of another run.
    """
    marker = read_marker(checkpoint)
    if marker is None:
        raise CheckpointError(f"checkpoint {checkpoint} is not complete: it has no {MARKER}")
    files = {name: checkpoint / name for name in marker["files"]} | dict(beside or {})
    with _opened(place, f"publishing the checkpoint to {place}") as (store, root):
        there = _marker(store, root)
        if there is not None and not there["run"] == marker["run"]:
            raise CheckpointError(
                f"{place} (checkpoint.path and run.name) has a checkpoint of another run, which is not "
                "overwritten; delete it, or give one of the two runs another run.name or checkpoint.path"
            )
        fence()
        if there is not None:
            store.rm_file(f"{root}/{MARKER}")
        same = there["files"] if there is not None and there["id"] == marker["id"] else {}
        for name, file in files.items():
            part = _Part(sent)
            if name not in same or name in (beside or {}):
                fence()
                store.put_file(str(file), f"{root}/{name}", callback=part)
            part.complete(file.stat().st_size)
        whole: Marker = {**marker, "files": {name: file.stat().st_size for name, file in files.items()}}
        store.invalidate_cache()
        if wrong := find_fault(whole, _sizes(store, root)):
            raise CheckpointError(f"publishing the checkpoint to {place} (checkpoint.path) failed: {wrong}")
        fence()
        _write_marker(store, root, whole)


class _Part(fsspec.callbacks.Callback):  # type: ignore[misc]
    """Reports how much of a file was sent. Some file systems report it while they send, others not at all."""

    def __init__(self, sent: Callable[[int], None]) -> None:
        super().__init__()
        self._sent = sent
        self._told = 0

    def relative_update(self, inc: int = 1) -> None:
        """Report `inc` more bytes as sent."""
        self._told += inc
        self._sent(inc)

    def complete(self, size: int) -> None:
        """Report the rest of a file of `size` bytes as sent."""
        self._sent(size - self._told)


class Survey(NamedTuple):
    """The checkpoints of a place by name."""

    complete: dict[str, Marker]
    damaged: dict[str, str]
    """Checkpoints that used to be complete, since they have their marker, with the file that is missing or has another
    size."""
    interrupted: dict[str, str]
    """Checkpoints that an upload or a deletion left half done, with the reason why they are incomplete."""


def survey_place(place: str, run: str | None = None) -> Survey:
    """List the checkpoints in a place. `run`: number of the only run whose checkpoints are listed; None: all runs. A
    checkpoint without a marker is listed in either case."""
    found = Survey({}, {}, {})
    with _opened(place, f"looking for checkpoints in {place}") as (store, root):
        listed = _sizes(store, root)
        for folder in sorted({name.partition("/")[0] for name in listed if name.startswith("step-") and "/" in name}):
            marker = _marker(store, f"{root}/{folder}")
            sizes = {
                name.removeprefix(f"{folder}/"): size for name, size in listed.items() if name.startswith(f"{folder}/")
            }
            wrong = find_fault(marker, sizes)
            if marker is None:
                found.interrupted[folder] = str(wrong)
            elif run is None or marker["run"] == run:
                if wrong is None:
                    found.complete[folder] = marker
                else:
                    found.damaged[folder] = wrong
    return found


def download_checkpoint(place: str, name: str, marker: Marker, root: Path) -> Path:
    """Copy a published checkpoint into a root folder, marker last, without the files in its subfolders.

    Raises CheckpointError if the place cannot be read, and DamagedCheckpointError if the size or the checksum of a file
    differs from the marker.
    """
    target = root / name
    partial = partial_of(target)
    for stale in (partial, target):
        shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir(parents=True)
    got: Marker = {**marker, "files": {file: size for file, size in marker["files"].items() if _is_name(file)}}
    with _opened(place, f"fetching the checkpoint {place}/{name}") as (store, where):
        for file in got["files"]:
            store.get_file(f"{where}/{name}/{file}", str(partial / file))
    if wrong := find_fault(got, {file: (partial / file).stat().st_size for file in got["files"]}):
        raise DamagedCheckpointError(f"fetching the checkpoint {place}/{name} failed: {wrong}")
    if wrong := find_damage(partial, marker):
        raise DamagedCheckpointError(f"checkpoint {place}/{name}: {wrong}")
    sync_all(partial)
    partial.rename(target)
    sync_folder(root)
    write_json(target / MARKER, seal(got))
    return target


def read_published(place: str, name: str, file: str) -> bytes:
    """The content of a file of a published checkpoint. Raises CheckpointError."""
    with _opened(place, f"reading the checkpoint {place}/{name}") as (store, root):
        return bytes(store.cat_file(f"{root}/{name}/{file}"))


def set_published_aside(place: str, name: str) -> str:
    """Rename a damaged checkpoint in a place, so that no reader mistakes it for a valid one. Return its new name.
    Raises CheckpointError."""
    with _opened(place, f"setting the damaged checkpoint {place}/{name} aside") as (store, root):
        aside = f"{DAMAGED}{name}"
        files = sorted(_sizes(store, f"{root}/{name}"), key=lambda file: file != MARKER)  # the marker goes first
        for file in files:
            store.mv(f"{root}/{name}/{file}", f"{root}/{aside}/{file}")
        if isinstance(store, LocalFileSystem):
            store.rm(f"{root}/{name}", recursive=True)
    return aside


def damaged_checkpoints(place: str) -> list[str]:
    """Names of the checkpoints in a place that were set aside."""
    with _opened(place, f"looking for checkpoints in {place}") as (store, root):
        tops = {name.partition("/")[0] for name in _sizes(store, root)}
    return sorted(name for name in tops if name.startswith(DAMAGED))


def prune_published(place: str, last: int, best: int, scores: Scores, run: str = "") -> None:
    """Delete a run's complete checkpoints in a place that need not be kept, each marker first, and incomplete ones
    older than the newest.

    An interrupted call may leave checkpoints without a marker or half deleted. The next call deletes them, and aborts
    interrupted uploads to S3. Checkpoints of other runs are neither deleted nor counted. Raises CheckpointError.
    """
    markers, _, interrupted = survey_place(place, run)
    newest = max(markers, key=lambda name: markers[name]["step"], default="")
    half = {name for name in interrupted if name < newest}
    with _opened(place, f"deleting old checkpoints in {place}") as (store, root):
        for name in sorted(set(markers) - checkpoints_to_keep(markers, last, best, scores) | half):
            if store.exists(f"{root}/{name}/{MARKER}"):
                store.rm_file(f"{root}/{name}/{MARKER}")
            store.rm(f"{root}/{name}", recursive=True)
    if "s3" in store.protocol:
        with _opened(place, f"aborting unfinished uploads in {place}"):
            _abort_uploads(store, root, newest)


def published_size(place: str, run: str) -> int:
    """Bytes of a run's checkpoints in a place, with those that were set aside. Raises CheckpointError."""
    with _opened(place, f"looking for checkpoints in {place}") as (store, root):
        return sum(sum(_sizes(store, f"{root}/{name}").values()) for name in _own(store, root, run))


def delete_published(place: str, run: str) -> None:
    """Delete all checkpoints of a run in a place, with those that were set aside, each marker last: a repeated call
    finds what an interrupted one has left. Raises CheckpointError."""
    with _opened(place, f"deleting the checkpoints in {place}") as (store, root):
        for name in _own(store, root, run):
            files = sorted(_sizes(store, f"{root}/{name}"), key=lambda file: file == MARKER)
            for file in files:
                store.rm_file(f"{root}/{name}/{file}")
            if isinstance(store, LocalFileSystem):
                store.rm(f"{root}/{name}", recursive=True)


def _own(store: Any, root: str, run: str) -> list[str]:  # noqa: ANN401
    """Names of the folders in a place whose marker has the run's number."""
    tops = {name.partition("/")[0] for name in _sizes(store, root) if "/" in name}
    names = sorted(name for name in tops if name.startswith(("step-", f"{DAMAGED}step-")))
    markers = {name: _marker(store, f"{root}/{name}") for name in names}
    return [name for name, marker in markers.items() if marker is not None and marker["run"] == run]


def _abort_uploads(store: Any, root: str, newest: str) -> None:  # noqa: ANN401
    """Abort the unfinished multipart uploads of checkpoints up to the newest. No file listing shows their parts."""
    bucket, _, folder = root.partition("/")
    begun = store.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{folder}/step-")
    for upload in begun.get("Uploads") or ():
        if upload["Key"].removeprefix(f"{folder}/").partition("/")[0] <= newest:
            store.abort_mpu(bucket, upload["Key"], upload["UploadId"])


def _sizes(store: Any, root: str) -> dict[str, int]:  # noqa: ANN401
    """Size of every file in a folder and its subfolders, by its path relative to the folder."""
    return {name.removeprefix(f"{root}/"): int(entry["size"]) for name, entry in store.find(root, detail=True).items()}


def _marker(store: Any, folder: str) -> Marker | None:  # noqa: ANN401
    return parse_marker(store.cat_file(f"{folder}/{MARKER}")) if store.exists(f"{folder}/{MARKER}") else None


def _write_marker(store: Any, folder: str, marker: Marker) -> None:  # noqa: ANN401
    """Write the marker once the files are stored durably. On S3 they are when S3 has answered."""
    if isinstance(store, LocalFileSystem):
        sync_all(Path(folder))
        write_json(Path(folder) / MARKER, seal(marker))
    else:
        store.pipe_file(f"{folder}/{MARKER}", json.dumps(seal(marker), indent=1).encode())


def _is_name(name: str) -> bool:
    """Whether the name is a file directly in the folder. The marker comes from outside and must not name files
    elsewhere."""
    return "/" not in name and name not in ("", ".", "..", MARKER)


@contextmanager
def _opened(place: str, doing: str) -> Iterator[tuple[Any, str]]:
    """The file system of a place, and the place's path there. It lists files anew, because any may be new. Raises
    CheckpointError, which begins with `doing`, for an error of the file system in the body."""
    try:
        store, root = fsspec.core.url_to_fs(place)
        if isinstance(store, LocalFileSystem):
            store.auto_mkdir = True
        store.invalidate_cache()
        yield store, str(root)
    except (OSError, botocore.exceptions.BotoCoreError) as error:
        raise CheckpointError(f"{doing} (checkpoint.path) failed: {error}") from error


def newest_whole(root: Path, place: str, run: str, say: Callable[[str], None]) -> Path | None:
    """Folder of the newest intact checkpoint in the root folder; None if the run has none.

    `place`: where run number `run` publishes its checkpoints, or "". It is read if the root folder has no checkpoint,
    or a damaged one. `say` gets a sentence about each skipped checkpoint. Damaged ones are renamed. Raises
    CheckpointError if all are damaged, because starting over would lose the run's steps.
    """
    interrupted = incomplete_checkpoints(root)
    for folder, message in interrupted.items():
        say(message)
        if (folder / MARKER).exists():  # it used to be complete
            set_aside(folder)
    found = None
    told: list[str] = []
    for folder in reversed(all_complete(root)):
        try:
            check_checkpoint(folder)
        except DamagedCheckpointError as error:
            told.append(str(error))
            say(f"{error}; skipped, and kept as {set_aside(folder).name}")
        else:
            found = folder
            break
    aside = [str(folder) for folder in sorted(root.glob(f"{DAMAGED}*"))]
    if place and (found is None or aside):
        here = -1 if found is None else step_of(found)
        found = _fetched(place=place, run=run, root=root, after=here, say=say) or found
        aside += [f"{place}/{name}" for name in damaged_checkpoints(place)]
    if found is None and aside:
        raise CheckpointError(
            "; ".join([*told, "no checkpoint of this run is intact"])
            + f"; to start again at step 0 delete the damaged ones: {', '.join(aside)}"
        )
    return found


def _fetched(place: str, run: str, root: Path, after: int, say: Callable[[str], None]) -> Path | None:
    """Download the newest intact checkpoint of a place that is of a later step than `after`; None if there is none."""
    there, damaged, interrupted = survey_place(place, run)
    for name, wrong in interrupted.items():
        say(f"checkpoint {place}/{name} is incomplete ({wrong}), ignored")
    for name, wrong in damaged.items():
        say(f"checkpoint {place}/{name}: {wrong}; skipped, and kept as {place}/{set_published_aside(place, name)}")
    for name in sorted(there, key=lambda name: there[name]["step"], reverse=True):
        if there[name]["step"] <= after:
            break
        try:
            folder = download_checkpoint(place, name, there[name], root)
            check_checkpoint(folder)
        except DamagedCheckpointError as error:
            say(f"{error}; skipped, and kept as {place}/{set_published_aside(place, name)}")
        else:
            say(f"checkpoint {name} comes from {place}")
            return folder
    return None
