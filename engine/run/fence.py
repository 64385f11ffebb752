"""Only the newest orchestrator, and the newest flow, of a run write it, also where a lock was lost.

The lock of a run folder can be lost: a node that an NFS server takes for dead loses it, and another process begins. So
each orchestrator and each flow takes the next number of its kind, and writes only while the number in the run folder is
its own. Logs and traces have no such check: their lines only stand beside those of the newer process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from engine.errors import BadInput, TakenOver
from engine.run.files import write_atomically

Kind = Literal["orchestrator", "flow"]
TAKEN_OVER = 3
"""Exit status of an orchestrator that stopped because another one has begun. The run folder is that one's, also for the
reason of a failure."""


@dataclass(frozen=True)
class Fence:
    """The right of an attempt to write a run folder."""

    folder: Path
    attempt: int
    """0: a process that took no number, which nobody fences off."""
    kind: Kind = "orchestrator"

    @staticmethod
    def begin(folder: Path, kind: Kind = "orchestrator") -> Fence:
        """Take the next number. To be called with the lock held."""
        fence = Fence(folder, _newest(folder, kind) + 1, kind)
        write_atomically(_file(folder, kind), f"{fence.attempt}\n")
        return fence

    @property
    def is_passed(self) -> bool:
        """Whether another one has begun since."""
        return bool(self.attempt) and _newest(self.folder, self.kind) != self.attempt

    def check(self) -> None:
        """Raise TakenOver if another one has begun since."""
        if self.is_passed:
            raise TakenOver(
                f"run folder {self.folder}: another {self.kind} (attempt {_newest(self.folder, self.kind)}) writes it "
                f"now; this one (attempt {self.attempt}) stops without writing any more"
            )


def check_readable(folder: Path) -> None:
    """Raise BadInput if a number of a run folder is damaged, so that no attempt could begin."""
    for kind in get_args(Kind):
        _newest(folder, kind)


def _file(folder: Path, kind: Kind) -> Path:
    return folder / f"{kind}_attempt"


def _newest(folder: Path, kind: Kind) -> int:
    """The number of the newest attempt; 0 before the first. Raises BadInput for a damaged file."""
    file = _file(folder, kind)
    if not file.exists():
        return 0
    text = file.read_text(errors="replace")
    if not (text.endswith("\n") and text.strip().isdecimal()):
        raise BadInput(
            f"{file}: the number of the newest attempt can't be read, because the file is damaged; make sure that no "
            f"{kind} of this run lives, then delete the file"
        )
    return int(text)
