"""Reads from S3: its errors in words, and copies of a run folder there for readers that know only folders.

The endpoint and the credentials are in the AWS_* variables.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.errors import BadInput

SCHEME = "s3://"
"""Scheme of addresses on S3."""
FIRST_S = 600.0
"""Seconds that the first copy of a run folder may take."""
REFRESH_S = 50.0
"""Seconds that a later one may take."""
EVERY_S = 10.0
"""Seconds between two listings of a folder."""
TAIL = 64 * 2**20
"""Bytes of the end of a file that are copied to watch a run."""
MOST = 2 * 2**30
"""Most bytes that are copied of a whole trace."""
PART = 16 * 2**20
"""Bytes of a request."""
OVERLAP = 4096
"""Bytes before a file's new end by which it is seen that lines were appended to it, and that it was not replaced."""
FOLDERS = ("", "logs/", "trace/", "responses/")
"""The subfolders that are listed. Those with weights are not."""
FILES = (
    "config.toml",
    "steps.jsonl",
    "evaluations.jsonl",
    "attempts.jsonl",
    "failure.json",
    "stages.json",
    "logs/notices.jsonl",
    "logs/progress.json",
    "logs/orchestrator.alive",
)
"""The files that are copied, with those of trace/."""
READS = 3
"""Number of times that a file is read which becomes shorter meanwhile."""
LINES = ".jsonl"
"""Suffix of the files to which lines are appended. The others are replaced as a whole."""
SPANS = re.compile(r"trace/[\w-][\w.-]*\.jsonl")


class ShorterFile(OSError):
    """A file that is asked for ends before the first byte that is wanted: it was replaced since it was listed."""


@contextmanager
def s3_errors(what: str) -> Iterator[None]:
    """Raise a BadInput that begins with `what` and says what to do, for an error of the body's S3 client."""
    import botocore.exceptions  # imported here, because it takes seconds, which local files do not need

    try:
        yield
    except FileNotFoundError:
        raise BadInput(f"{what}: no such file or folder on S3") from None
    except TimeoutError:
        raise BadInput(f"{what}: S3 has not sent it in time; does AWS_ENDPOINT_URL hold its address?") from None
    except ShorterFile:
        raise BadInput(f"{what}: a file has become shorter each time it was read; try again when it stays") from None
    except (OSError, botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        raise BadInput(
            f"{what}: S3 cannot be read ({error}); AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY must hold its address and your credentials"
        ) from None


def open_s3() -> Any:  # noqa: ANN401
    """The file system of S3, which keeps no listing: a file may be new."""
    import s3fs

    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)


class CopiedFolder:
    """Copies, in a folder of this machine, of the small files of a run folder on S3.

    A file is copied again when it has changed; of one to which lines were appended, only these.
    """

    def __init__(self, address: str, parent: Path, whole: bool) -> None:
        """`address`: s3://bucket/…/NAME. `parent`: the copies are in its folder NAME. `whole`: of each file all is
        copied, else the last lines, `TAIL` bytes."""
        place = address.removeprefix(SCHEME).rstrip("/")
        self.address = SCHEME + place
        name = place.rpartition("/")[2]
        if name in ("", ".", ".."):
            raise BadInput(f"{address}: expected s3://bucket/…/NAME of a run")
        self.path = parent / name
        self.newest = 0.0
        """When the newest of the listed files was written, in seconds since the epoch."""
        self._whole = whole
        self._store = open_s3()
        self._listed: dict[str, Any] = {}
        """What S3 says of each file, by its name in the folder."""
        self._copied: dict[str, tuple[str, int]] = {}
        """ETag and size of the object of each copy."""
        self._listed_at = 0.0
        self._deadline = 0.0

    def refresh(self, within_s: float = REFRESH_S) -> None:
        """Bring the copies up to date, if they are older than `EVERY_S`.

        Raises BadInput if S3 can't be read, or not within so many seconds, if the address has no run folder, and with
        `whole` if there is more than `MOST`.
        """
        if self._listed_at and time.monotonic() - self._listed_at < EVERY_S:
            return
        self._deadline = time.monotonic() + within_s
        with s3_errors(self.address):
            self._list()
            wanted = [name for name in self._listed if name in FILES or SPANS.fullmatch(name)]
            size = sum(self._listed[name]["size"] for name in wanted)
            if self._whole and size > MOST:
                raise BadInput(
                    f"{self.address}: its trace has {size / 2**30:.1f} GiB, more than the {MOST / 2**30:.0f} GiB that "
                    "are copied; copy the folder yourself, and name the copy"
                )
            for name in wanted:
                self._copy(name)
        for name in [name for name in self._copied if name not in self._listed]:
            (self.path / name).unlink()
            del self._copied[name]
        self._listed_at = time.monotonic()

    def names(self, folder: str) -> list[str]:
        """Names of the listed files in a subfolder."""
        return [name.removeprefix(folder) for name in self._listed if name.startswith(folder)]

    def fetch(self, name: str) -> None:
        """Copy one more file, if it is listed. Raises BadInput if S3 can't be read."""
        self._deadline = time.monotonic() + REFRESH_S
        with s3_errors(self.address):
            if name in self._listed:
                self._copy(name)

    def _list(self) -> None:
        listed: dict[str, Any] = {}
        for folder in FOLDERS:
            try:
                found = self._call("ls", f"{self.address}/{folder}", detail=True)
            except FileNotFoundError:
                continue
            prefix = f"{self.address.removeprefix(SCHEME)}/"
            listed |= {one["name"].removeprefix(prefix): one for one in found if one["type"] == "file"}
        if "config.toml" not in listed:
            raise BadInput(f"{self.address}: there is no run folder, because it has no config.toml")
        self._listed = listed
        self.newest = max(one["LastModified"].timestamp() for one in listed.values())

    def _copy(self, name: str) -> None:
        """Copy a file if it has changed. One that was deleted since it was listed is listed no more, and one that has
        become shorter is looked up again."""
        for number in range(READS):
            entry = self._listed[name]
            mark = (entry["ETag"], entry["size"])
            if self._copied.get(name) == mark:
                return
            try:
                self._copy_changed(name, entry)
                self._copied[name] = mark
                return
            except ShorterFile:
                if number + 1 == READS:
                    raise
                self._copied.pop(name, None)
                with suppress(FileNotFoundError):
                    self._listed[name] = self._call("info", f"{self.address}/{name}")
            except FileNotFoundError:
                del self._listed[name]
                return

    def _copy_changed(self, name: str, entry: Mapping[str, Any]) -> None:
        target = self.path / name
        if not self._append(name, target):
            target.parent.mkdir(parents=True, exist_ok=True)
            begin = 0 if self._whole or not name.endswith(LINES) else max(0, entry["size"] - TAIL)
            partial = target.with_name(f".{target.name}.partial")
            with partial.open("wb") as file:
                for number, part in enumerate(self._read(name, begin)):
                    file.write(part.partition(b"\n")[2] if begin and number == 0 else part)
            partial.replace(target)
        written = entry["LastModified"].timestamp()
        os.utime(target, (written, written))

    def _append(self, name: str, target: Path) -> bool:
        """Whether the copy could be completed by the lines that are new."""
        before = self._copied.get(name, ("", 0))[1]
        if not name.endswith(LINES) or not 0 < before < self._listed[name]["size"]:
            return False
        with target.open("r+b") as file:
            known = min(OVERLAP, before, file.seek(0, os.SEEK_END))
            file.seek(-known, os.SEEK_END)
            same = file.read()
            parts = self._read(name, before - known)
            first = next(parts)
            if first[:known] != same:
                return False
            file.write(first[known:])
            for part in parts:
                file.write(part)
        return True

    def _read(self, name: str, begin: int) -> Iterator[bytes]:
        size = self._listed[name]["size"]
        if size and not name.endswith(LINES):  # replaced as a whole, maybe since it was listed: to its end of now
            yield self._call("cat_file", f"{self.address}/{name}", start=0, end=None)
            return
        for start in range(begin, size, PART):
            yield self._call("cat_file", f"{self.address}/{name}", start=start, end=min(size, start + PART))

    def _call(self, method: str, path: str, **arguments: Any) -> Any:  # noqa: ANN401
        left = self._deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            return getattr(self._store, method)(path, timeout=left, **arguments)
        except OSError as error:
            if _range_error(error):
                raise ShorterFile(path) from None
            if not isinstance(error, TimeoutError):
                raise
            raise BadInput(f"{path}: S3 has not sent it within the time for reading a run folder") from None


def _range_error(error: OSError) -> bool:
    """Whether S3 says that a file ends before the bytes that were asked for."""
    answer = getattr(error.__cause__, "response", None) or {}
    return answer.get("Error", {}).get("Code") in ("InvalidRange", "416")


@contextmanager
def copied_folder(address: str, whole: bool) -> Iterator[CopiedFolder]:
    """The copies of a run folder on S3, in a temporary folder, which goes with the body. `whole` as in `CopiedFolder`.
    Raises BadInput as `CopiedFolder.refresh` does."""
    with TemporaryDirectory(prefix="metronome-s3-") as parent:
        with s3_errors(address):
            folder = CopiedFolder(address, Path(parent), whole)
        folder.refresh(FIRST_S)
        yield folder
