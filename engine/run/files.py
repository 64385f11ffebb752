"""Writes state files and files of JSON lines so that both survive a kill and a power cut.

A state file is written under a temporary name, synced and renamed, and its folder is synced. So it is always complete
or absent. A file of lines may end in a torn line; readers skip that line, and the next append removes it.

A file or a line that is damaged otherwise is a BadInput that names it and says how to repair it. The objects on which a
resume depends have a checksum.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import BadInput, MetronomeError
from engine.run.logs import log_error

CHECKSUM = "checksum"
"""Key of an object's own checksum, a SHA-256."""


NEEDLESS = ("notices.jsonl", "dropped.jsonl")
"""Files on which nothing depends. A damaged line in them is left out, with a warning."""
_warned: set[Path] = set()
"""Files of NEEDLESS about which a warning was printed."""


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: it is complete or absent, even after a power cut. OSError leaves nothing behind."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        put_in_place(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def put_in_place(partial: Path, path: Path) -> None:
    """Give a finished file its final name, where it is complete or absent, even after a power cut."""
    _sync_file(partial)
    partial.replace(path)
    sync_folder(path.parent)


def write_unsynced(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that is complete or absent as long as the machine runs. For files that only living processes
    read."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(encode_json(content, path))
    partial.replace(path)


def write_json(path: Path, content: Mapping[str, Any] | Iterable[Any]) -> None:
    """Write a JSON file atomically. Raises MetronomeError as `encode_json` does."""
    write_atomically(path, encode_json(content, path, indent=1))


def encode_json(content: Mapping[str, Any] | Iterable[Any], path: Path, indent: int | None = None) -> str:
    """The content of a JSON file. Raises MetronomeError, which names the file and the key, for a number that is not
    finite, because JSON has none."""
    try:
        return json.dumps(content, indent=indent, allow_nan=False)
    except ValueError:
        rows = content.items() if isinstance(content, Mapping) else enumerate(content)
        wrong = [f"{key} = {value}" for key, value in rows if isinstance(value, float) and not math.isfinite(value)]
        raise MetronomeError(f"{path.name}: {', '.join(wrong) or 'a number in it'} is not finite") from None


def encode_for_page(content: Mapping[str, Any]) -> str:
    """Compact JSON for a script element of a page: no text in it can end the script or begin a comment."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def sync_all(folder: Path) -> None:
    """Sync a folder's files and their names to the disk."""
    for path in folder.iterdir():
        if path.is_file():
            _sync_file(path)
    sync_folder(folder)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk, after files were created, renamed or removed there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path, what: str, repair: str, kind: Any = dict[str, Any], sealed: bool = False) -> Any:  # noqa: ANN401
    """The JSON object in a state file: of type `kind`, and with `sealed` as `seal` made it, without its checksum.

    Raises BadInput for a damaged file. The message says what the file holds (`what`) and how to repair it (`repair`).
    """
    text = path.read_bytes()
    found = open_sealed(text) if sealed else parse_object(text)
    try:
        msgspec.convert(found, kind)
    except (msgspec.ValidationError, UnicodeEncodeError):
        found = None
    if found is None:
        raise BadInput(f"{path}: {what} can't be read, because the file is damaged ({_size(path)}); {repair}")
    return found


def parse_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object in a text; None for a text that is not one."""
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with its own checksum, so that any change in its file is noticed."""
    plain = {key: value for key, value in content.items() if key != CHECKSUM}
    return {**plain, CHECKSUM: _checksum(plain)}


def open_sealed(text: bytes) -> dict[str, Any] | None:
    """The content of an object that `seal` made; None if anything in it has changed."""
    found = parse_object(text)
    return found if found is not None and found.pop(CHECKSUM, None) == _checksum(found) else None


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def append_line(path: Path, row: Mapping[str, object]) -> None:
    """Append one JSON object as a line, in one synced write. A torn last line is removed first. On a full disk
    (OSError) the file is unchanged. Raises MetronomeError as `encode_json` does."""
    append_lines(path, [encode_json(row, path)], sync=True)


def append_lines(path: Path, lines: Iterable[str], sync: bool = False) -> None:
    """Append lines in one write. A torn last line is removed first. On a full disk (OSError) the file is unchanged.
    `sync`: also sync the file to the disk."""
    data = "".join(f"{line}\n" for line in lines).encode()
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the orchestrator and a rank may append at the same time
        size = cut_torn_line(path)
        try:
            while data:
                data = data[file.write(data) :]
            if sync:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


def read_lines(path: Path) -> Iterator[Any]:
    """Yield the JSON objects in a file of lines. A torn last line is skipped. Any other line may be damaged as in
    `parse_line`."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            if (row := parse_line(path, number, line)) is not None:
                yield row


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line of a file.

    Raises BadInput for a damaged line. In a file of NEEDLESS it is None, and the first one is a warning.
    """
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        found = parse_object(line)  # Python's own parser accepts NaN and Infinity
    if isinstance(found, dict):
        return found
    said = f"{path}, line {number}: it is damaged, expected a JSON object; truncate the file before this line"
    if path.name not in NEEDLESS:
        raise BadInput(said)
    if path not in _warned:
        log_error(f"warning: {said}, or leave it: nothing depends on it")
    _warned.add(path)
    return None


def cut_torn_line(path: Path) -> int:
    """Remove a torn last line from a file of lines. Return the size of the complete lines in bytes."""
    size = _whole_lines(path) if path.exists() else 0
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)
    return size


def _whole_lines(path: Path) -> int:
    """Size in bytes of the file without a torn last line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - 4096)
            file.seek(begin)
            if (found := file.read(end - begin).rfind(b"\n")) >= 0:
                return begin + found + 1
            end = begin
    return 0


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size} bytes" if size else "it is empty"


class GrowingLines:
    """The JSON lines of a file that other processes append to. A file that was replaced is read anew."""

    def __init__(self, path: Path, part: bytes = b"") -> None:
        """`part`: only lines with these bytes are read."""
        self.path = path
        self.rows: list[dict[str, Any]] = []
        """What `read` has read so far."""
        self.of = 0
        """Number of the file; another one after it was replaced. Below 2**53, up to which a page's numbers are exact;
        inode numbers of Lustre and the like are above."""
        self._part = part
        self._position = 0
        self._lines = 0

    def read(self) -> list[dict[str, Any]]:
        """Read the new complete lines, and return all. Raises BadInput for a damaged line."""
        new = self.read_new()  # which may begin anew
        self.rows += new
        return self.rows

    def read_new(self) -> list[dict[str, Any]]:
        """The complete lines that were added since the last call, all of a file that was replaced. Raises BadInput for
        a damaged one, again in each later call."""
        if not self.path.exists():
            self._begin(0)
            return []
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            number = status.st_ino % 2**53
            if number != self.of or status.st_size < self._position:
                self._begin(number)
            file.seek(self._position)
            found: list[dict[str, Any]] = []
            position = self._position
            lines = self._lines
            for line in file:  # not all at once: a trace has gigabytes
                if not line.endswith(b"\n"):
                    break
                lines += 1
                position += len(line)
                row = parse_line(self.path, lines, line) if self._part in line else None
                found += [row] if row is not None else []
        self._position = position
        self._lines = lines
        return found

    def _begin(self, of: int) -> None:
        self.rows = []
        self.of = of
        self._position = 0
        self._lines = 0
