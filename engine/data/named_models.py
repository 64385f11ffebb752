"""Models that `model.path` names: on the Hugging Face hub, or s3://bucket/folder, of which a copy is kept beside the
hub's cache (HF_HOME). Endpoint and credentials of S3 are in the AWS_* variables, as for problem sets."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from engine.data.hub import MODEL_FILES, check_files, fetch_model, is_model_name
from engine.errors import BadInput
from engine.run.lock import hold_lock
from engine.run.progress import folder_size
from engine.run.s3 import SCHEME, open_s3, s3_errors

COPIES = "metronome-s3"
"""The folder in HF_HOME with the copies; that of s3://bucket/folder is bucket/folder@digest in it."""
DIGITS = 12
"""Digits of the digest over the names, sizes and ETags of a model's files on S3."""
REACH_S = 60.0
"""Time limit in seconds for S3 to list a folder, or to send a small file."""
WAIT_S = 600.0
"""Seconds without another byte for which a process waits while another one copies the same model."""
_File = tuple[str, int, str]
"""Name, size and ETag of a file of a model."""
_COPY = re.compile(rf".*/{COPIES}/(?P<name>.+@[0-9a-f]{{{DIGITS}}})")


def is_named_model(path: str) -> bool:
    """Whether a path is an address on S3 or the name of a model on the hub (`is_model_name`)."""
    return path.startswith(SCHEME) or is_model_name(path)


def fetch_named(path: str) -> Path:
    """The folder with a model (`is_named_model`), downloaded unless it is there. Raises BadInput like `fetch_model`;
    for S3 also if a file of the model changes meanwhile, or if the copy can't be written."""
    return _fetch_s3(path) if path.startswith(SCHEME) else fetch_model(path)


def model_name(folder: Path) -> str:
    """The name of a model: owner/name@commit or s3://bucket/folder@digest for a folder that `fetch_named` returns, else
    the folder's name."""
    if copy := _COPY.fullmatch(folder.as_posix()):
        return SCHEME + copy["name"]
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return folder.name
    return f"{repository.removeprefix('models--').replace('--', '/')}@{folder.name}"


def is_of_name(folder: Path, path: str) -> bool:
    """Whether `fetch_named` returns, or has returned, this folder for a path, whatever the model's commit or digest."""
    name = path.rstrip("/") if path.startswith(SCHEME) else path.partition("@")[0]
    return is_named_model(path) and name == model_name(folder).rpartition("@")[0]


def fetch_s3_config(path: str, folder: Path) -> None:
    """Write the config.json of a model on S3 into a folder, and nothing else. Raises BadInput if it can't be read."""
    file = "/".join((*_parts(path), "config.json"))
    with s3_errors(f"model {path}: {SCHEME}{file}"):
        content = open_s3().cat_file(file, timeout=REACH_S)
    (folder / "config.json").write_bytes(content)


def _fetch_s3(path: str) -> Path:
    from huggingface_hub import constants

    *above, last = _parts(path)
    with s3_errors(f"model {path}"):
        store = open_s3()
        files = _listed(path, store)
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:DIGITS]
    place = Path(constants.HF_HOME, COPIES, *above, f"{last}@{digest}")
    partial = place.with_name(f".{place.name}.partial")
    what = f"the copy {place} of {path}"
    try:
        if _are_in(place, files):
            return place
        with hold_lock(partial.with_suffix(".lock"), what, WAIT_S, progress=lambda: folder_size(partial)):
            if not _are_in(place, files):
                _copy(path, store, files, partial)
                shutil.rmtree(place, ignore_errors=True)  # a file of it was removed
                partial.rename(place)
    except OSError as error:
        raise BadInput(f"model {path}: its copy {place} can't be written ({error}); HF_HOME says where it is") from None
    return place


def _are_in(folder: Path, files: Sequence[_File]) -> bool:
    """Whether a folder has all files in their sizes."""
    found = [folder / name for name, _, _ in files]
    return all(file.is_file() for file in found) and [file.stat().st_size for file in found] == [f[1] for f in files]


def _copy(path: str, store: Any, files: Sequence[_File], folder: Path) -> None:  # noqa: ANN401
    """Copy the files of a model into a new folder. Raises BadInput if they are not those that were listed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    place = "/".join(_parts(path))
    with s3_errors(f"model {path}"):
        store.get([f"{place}/{name}" for name, _, _ in files], [str(folder / name) for name, _, _ in files])
        changed = sorted({name for name, _, _ in set(files) ^ set(_listed(path, store))})
    if changed or not _are_in(folder, files):
        raise BadInput(
            f"model {path}: {', '.join(changed) or 'a file'} has changed on S3 since it was listed, or did not arrive "
            "whole; start again when nobody writes there"
        )


def _parts(path: str) -> list[str]:
    """Bucket and folders of an address."""
    parts = path.removeprefix(SCHEME).rstrip("/").split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        raise BadInput(f"model {path}: not the address of a folder; expected s3://bucket/folder")
    return parts


def _listed(path: str, store: Any) -> list[_File]:  # noqa: ANN401
    """The files of a model on S3 that are copied, sorted by name. Raises BadInput if it is none."""
    folder = "/".join(_parts(path))
    found = store.ls(folder, detail=True, timeout=REACH_S)
    if any(one["type"] == "file" and one["name"] == folder for one in found):  # a file is listed as itself
        raise BadInput(f"model {path}: a file on S3; expected the address of its folder, s3://bucket/folder")
    there = {one["name"].removeprefix(f"{folder}/"): one for one in found if one["type"] == "file"}
    check_files(path, there, "on S3")
    return [
        (name, one["size"], one["ETag"])
        for name, one in sorted(there.items())
        if any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)
    ]
