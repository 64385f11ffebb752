"""Only the newest launcher of a run writes it, also where a lock was lost.

The lock of a run folder can be lost: a node that an NFS server takes for dead loses it, and another launcher begins. So
each launcher takes the next number, and writes only while the number in the run folder is its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import BadInput, TakenOver
from engine.run.files import write_atomically

FILE = "launcher_attempt"


@dataclass(frozen=True)
class Fence:
    """The right of an attempt to write a run folder."""

    folder: Path
    attempt: int
    """0: a process without a launcher, which nobody fences off."""

    @staticmethod
    def begin(folder: Path) -> Fence:
        """Take the next number. To be called with the launcher's lock held."""
        fence = Fence(folder, _newest(folder) + 1)
        write_atomically(folder / FILE, f"{fence.attempt}\n")
        return fence

    @property
    def is_passed(self) -> bool:
        """Whether another launcher has begun since."""
        return bool(self.attempt) and _newest(self.folder) != self.attempt

    def check(self) -> None:
        """Raise TakenOver if another launcher has begun since."""
        if self.is_passed:
            raise TakenOver(
                f"run folder {self.folder}: another launcher (attempt {_newest(self.folder)}) writes it now; "
                f"this one (attempt {self.attempt}) stops without writing any more"
            )


def _newest(folder: Path) -> int:
    """The number of the newest attempt; 0 before the first. Raises BadInput for a damaged file."""
    file = folder / FILE
    if not file.exists():
        return 0
    text = file.read_text(errors="replace")
    if not (text.endswith("\n") and text.strip().isdecimal()):
        raise BadInput(
            f"{file}: the number of the newest attempt can't be read, because the file is damaged; make sure that no "
            "launcher of this run lives, then delete the file"
        )
    return int(text)
