"""Models that `model.path` names: on the Hugging Face hub, or s3://bucket/folder, of which a copy is kept beside the
hub's cache (HF_HOME). Endpoint and credentials of S3 are in the AWS_* variables, as for problem sets."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from engine.data.hub import MODEL_FILES, Download, check_files, fetch_model, is_model_name
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
PIECE = 8 * 2**20
"""Bytes of a request."""
PIECES = 8
"""Requests at a time."""
SEND_S = 300.0
"""Time limit in seconds for S3 to answer so many requests."""
WAIT_S = 2 * SEND_S
"""Seconds without another byte for which a process waits while another one copies the same model."""
_COPY = re.compile(rf".*/{COPIES}/(?P<name>.+@[0-9a-f]{{{DIGITS}}})")
_MD5 = re.compile(r"[0-9a-f]{32}")


def is_named_model(path: str) -> bool:
    """Whether a path is an address on S3 or the name of a model on the hub (`is_model_name`)."""
    return path.startswith(SCHEME) or is_model_name(path)


def fetch_named(path: str, download: Download | None = None) -> Path:
    """The folder with a model (`is_named_model`), downloaded unless it is there. Raises BadInput like `fetch_model`;
    for S3 also if a file of the model changes meanwhile, or if the copy can't be written."""
    return _fetch_s3(path, download or Download()) if path.startswith(SCHEME) else fetch_model(path, download)


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


@dataclass(frozen=True)
class _Object:
    """A file of a model, as S3 lists it."""

    key: str
    """bucket/folder/name."""
    name: str
    size: int
    etag: str

    def is_in(self, folder: Path) -> bool:
        file = folder / self.name
        return file.is_file() and file.stat().st_size == self.size


def _fetch_s3(path: str, download: Download) -> Path:
    from huggingface_hub import constants

    *above, last = _parts(path)
    with s3_errors(f"model {path}"):
        store = open_s3()
        files = _listed(path, store)
    listing = json.dumps([(file.name, file.size, file.etag) for file in files])
    digest = hashlib.sha256(listing.encode()).hexdigest()[:DIGITS]
    place = Path(constants.HF_HOME, COPIES, *above, f"{last}@{digest}")
    partial = place.with_name(f".{place.name}.partial")

    def progress() -> int:
        download.done = folder_size(partial)
        return download.done

    try:
        if all(file.is_in(place) for file in files):
            return place
        download.total = sum(file.size for file in files)
        with hold_lock(partial.with_suffix(".lock"), f"the copy {place} of {path}", WAIT_S, progress=progress):
            if not all(file.is_in(place) for file in files):
                if place.exists():  # a file of it was removed
                    shutil.rmtree(partial, ignore_errors=True)
                    place.rename(partial)
                partial.mkdir(exist_ok=True)
                copying = _Copying(path=path, store=store, folder=partial, progress=progress)
                for file in files:
                    copying.fetch(file)
                partial.rename(place)
    except OSError as error:
        raise BadInput(f"model {path}: its copy {place} can't be written ({error}); HF_HOME says where it is") from None
    return place


def _parts(path: str) -> list[str]:
    """Bucket and folders of an address."""
    parts = path.removeprefix(SCHEME).rstrip("/").split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        raise BadInput(f"model {path}: not the address of a folder; expected s3://bucket/folder")
    return parts


def _listed(path: str, store: Any) -> list[_Object]:  # noqa: ANN401
    """The files of a model on S3 that are copied, sorted by name. Raises BadInput if it is none."""
    folder = "/".join(_parts(path))
    found = store.ls(folder, detail=True, timeout=REACH_S)
    if any(one["type"] == "file" and one["name"] == folder for one in found):  # a file is listed as itself
        raise BadInput(f"model {path}: a file on S3; expected the address of its folder, s3://bucket/folder")
    there = {one["name"].removeprefix(f"{folder}/"): one for one in found if one["type"] == "file"}
    check_files(path, there, "on S3")
    return [
        _Object(key=one["name"], name=name, size=one["size"], etag=one["ETag"])
        for name, one in sorted(there.items())
        if any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)
    ]


@dataclass(frozen=True)
class _Copying:
    """A copy of a model on S3 that is being made."""

    path: str
    """Of the model."""
    store: Any
    """The file system of S3."""
    folder: Path
    """Where the copy is made."""
    progress: Callable[[], object]
    """Called after each part of a file."""

    def fetch(self, file: _Object) -> None:
        """Fetch what a file lacks at its end; an earlier copy may have left its beginning. Raises BadInput if what
        arrives isn't the file."""
        target = self.folder / file.name
        begun = target.exists()
        self._append(file, target)
        if begun and not self._is_whole(file, target):  # what was there is not its beginning
            target.unlink()
            self._append(file, target)
        if not self._is_whole(file, target):
            target.unlink()
            raise BadInput(f"model {self.path}: S3 has sent a {file.name} that has not its ETag {file.etag}; try again")

    def _append(self, file: _Object, target: Path) -> None:
        self.store.s3_additional_kwargs = {"IfMatch": file.etag}  # an object that has changed is not sent
        with target.open("ab") as opened:
            while (begin := opened.tell()) < file.size:
                starts = list(range(begin, min(file.size, begin + PIECES * PIECE), PIECE))
                ends = [min(file.size, start + PIECE) for start in starts]
                keys = [file.key] * len(starts)
                with _refusing(self.path, file):
                    parts = self.store.cat_ranges(keys, starts, ends, on_error="raise", timeout=SEND_S)
                opened.writelines(parts)
                opened.flush()
                self.progress()

    def _is_whole(self, file: _Object, target: Path) -> bool:
        """Whether a file has the size and, if its ETag is one, the MD5 that S3 says."""
        if not file.is_in(self.folder):
            return False
        etag = file.etag.strip('"')
        if not _MD5.fullmatch(etag):  # was uploaded in parts
            return True
        with target.open("rb") as opened:
            if hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == etag:
                return True
        bucket, _, key = file.key.partition("/")
        with _refusing(self.path, file):
            about = self.store.call_s3("head_object", Bucket=bucket, Key=key, timeout=REACH_S)
        return not _has_md5(about)


def _has_md5(about: Mapping[str, Any]) -> bool:
    """Whether the ETag of an object that was not uploaded in parts is its MD5. It is none with keys of KMS or the
    user's, and in a directory bucket."""
    plain = about.get("ServerSideEncryption") in (None, "AES256") and "SSECustomerAlgorithm" not in about
    return plain and about.get("StorageClass") != "EXPRESS_ONEZONE"


@contextmanager
def _refusing(path: str, file: _Object) -> Iterator[None]:
    """As `s3_errors`, and for a file that has changed since it was listed."""
    with s3_errors(f"model {path}: {file.name}"):
        try:
            yield
        except OSError as error:
            answer = getattr(error.__cause__, "response", {})
            if answer.get("Error", {}).get("Code") not in ("PreconditionFailed", "412"):
                raise
            raise BadInput(
                f"model {path}: {file.name} has changed on S3 since it was listed; start again when nobody writes there"
            ) from None
