"""Messages from the process of a part to the process that started it, in a file of JSON lines, so that nothing is lost
when the part hangs or crashes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import MetronomeError
from engine.run.files import append_line, read_lines
from engine.types import JsonObject

SLOWER_START_S = {"npu": 200.0}
"""By platform: seconds that the start of an instance may take beyond the limits of the parts. vllm-ascend on Kunpeng
takes 120 to 200 s, because each process imports for a minute and then captures graphs."""


class PartEnded(MetronomeError):
    """A part ends before its end."""

    status: str

    def __init__(self, reason: str, remedy: str = "") -> None:
        """`remedy`: what to do; "" if nothing can be done or, for a failure, for the remedy in the part's own entry
        (ACCEPTANCE)."""
        super().__init__(reason)
        self.remedy = remedy


class PartSkipped(PartEnded):
    """A part cannot run on this machine."""

    status = "skipped"


class PartFailed(PartEnded):
    """A part has run and found something wrong."""

    status = "failed"


class NoteWriter:
    """The part's side of the file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def doing(self, what: str) -> None:
        """Say what the part does or waits for from now on."""
        append_line(self._file, {"doing": what})

    def say(self, line: str) -> None:
        """Add a line to the report."""
        append_line(self._file, {"line": line})

    def figures(self, **figures: object) -> None:
        """Add figures to the JSON report."""
        append_line(self._file, {"figures": figures})

    def end(self, status: str, reason: str = "", remedy: str = "") -> None:
        """Say how the part ended. This is the last line."""
        append_line(self._file, {"end": {"status": status, "reason": reason, "remedy": remedy}})


@dataclass
class Notes:
    """What a part has written so far."""

    doing: str = "starting"
    lines: list[str] = field(default_factory=list)
    figures: JsonObject = field(default_factory=dict)
    end: JsonObject | None = None
    """Status, reason and remedy; None if the part did not reach its end."""

    @staticmethod
    def read(file: Path) -> Notes:
        """Read the file of a part. Without a file, the notes are empty."""
        notes = Notes()
        for line in read_lines(file) if file.exists() else ():
            notes.doing = line.get("doing", notes.doing)
            notes.lines += [line["line"]] if "line" in line else []
            notes.figures |= line.get("figures", {})
            notes.end = line.get("end", notes.end)
        return notes


@dataclass(frozen=True)
class PartTask:
    """The input of the process of a part."""

    platform: str
    """The value of platform.device."""
    settings: tuple[str, ...]
    """The user's overrides, which apply to every run that the part starts."""
    folder: Path
    """Folder for logs, models and runs."""
    notes: NoteWriter


def notes_of(folder: Path, part: str) -> Path:
    """The file in which a part's process writes what it does."""
    return folder / f"{part.replace(' ', '-')}.jsonl"
