"""The progress of long work. The process that works writes it to a file, and one that shows it reads the file."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from engine.run.files import write_unsynced


@dataclass(frozen=True)
class Progress:
    """How far some work is."""

    text: str
    share: float | None = None
    """Share of the work that is done, 0 … 1; None if unknown."""


def write_progress(file: Path, progress: Progress) -> None:
    """Replace the file's content. Raises OSError."""
    write_unsynced(file, asdict(progress))


def read_progress(file: Path) -> Progress | None:
    """What was written last; None if nothing can be read: nothing was written yet, or the file was removed at the end
    or is damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Progress)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def folder_size(folder: Path) -> int:
    """Bytes of the files in a folder and its subfolders. Files that vanish during the count are left out."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size if path.is_file() else 0
    return size


def format_size(size: float) -> str:
    """A number of bytes as text."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
