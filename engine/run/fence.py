"""Only the newest orchestrator and the newest flow of a run may write to it, even if a lock was lost.

The lock of a run folder can be lost: an NFS server that believes a node is dead releases the node's locks, and another
process begins. So each orchestrator and each flow takes the next number of its kind, and writes only while the number
in the run folder is its own. Logs and traces are not checked: their lines only mix with those of the newer process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from engine.errors import BadInput, TakenOver
from engine.run.files import write_atomically

Kind = Literal["orchestrator", "flow"]


@dataclass(frozen=True)
class Fence:
    """The right of an attempt to write to a run folder."""

    folder: Path
    attempt: int
    """Number of the attempt. 0: a process that took no number and is never fenced off."""
    kind: Kind = "orchestrator"

    @staticmethod
    def begin_attempt(folder: Path, kind: Kind = "orchestrator") -> Fence:
        """Take the next number. The caller must hold the lock."""
        fence = Fence(folder, _newest(folder, kind) + 1, kind)
        write_atomically(_file(folder, kind), f"{fence.attempt}\n")
        return fence

    @property
    def is_passed(self) -> bool:
        """Whether a newer attempt has begun."""
        return bool(self.attempt) and _newest(self.folder, self.kind) != self.attempt

    def check_attempt(self) -> None:
        """Raise TakenOver if a newer attempt has begun."""
        if self.is_passed:
            raise TakenOver(
                f"run folder {self.folder}: another {self.kind} (attempt {_newest(self.folder, self.kind)}) writes it "
                f"now; this one (attempt {self.attempt}) stops without writing any more"
            )


def check_readable(folder: Path) -> None:
    """Raise BadInput if an attempt number in a run folder is damaged, so that no attempt could begin."""
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
    if not (text.endswith("\n") and text.strip().isdecimal() and len(text) < 20):
        raise BadInput(
            f"{file}: the number of the newest attempt can't be read, because the file is damaged; make sure that no "
            f"{kind} of this run is running, then delete the file"
        )
    return int(text)
