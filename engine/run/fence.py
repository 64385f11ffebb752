"""Only the newest attempt at a run may write to it, even if a lock was lost.

The lock of a run folder can be lost: an NFS server that believes a node is dead releases the node's locks, and another
process begins. So each attempt takes the next number, and it and its orchestrator write only while the newest number in
run.json is theirs. Logs and traces are not checked: their lines only mix with those of the newer attempt.
"""

from __future__ import annotations

import time
from pathlib import Path

from engine.errors import TakenOver
from engine.run.run_file import ATTEMPTS, Attempt, Start, read_run, update_run


class Fence:
    """The right of an attempt to write to a run folder."""

    def __init__(self, folder: Path, attempt: int = 0, lock: int | None = None) -> None:
        """`attempt`: its number; 0: a process that took no number and is never fenced off. `lock`: the open file that
        holds the folder's lock, for the orchestrator."""
        self.folder = folder
        self.attempt = attempt
        self.lock = lock

    def begin_attempt(
        self,
        what: Start,
        why: str,
        progress: tuple[int, int] = (0, -1),
        by_hand: bool = False,
    ) -> None:
        """Take the next number. The caller must hold the lock. Raises TakenOver if a newer attempt has begun."""
        self.check_attempt()
        before = read_run(self.folder)
        taken = Attempt(
            number=before.attempt + 1, at=time.time(), what=what, why=why, progress=progress, by_hand=by_hand
        )
        update_run(self.folder, attempts=(*before.attempts, taken)[-ATTEMPTS:])
        self.attempt = taken.number

    @property
    def is_passed(self) -> bool:
        """Whether a newer attempt has begun."""
        return bool(self.attempt) and read_run(self.folder).attempt != self.attempt

    def check_attempt(self) -> None:
        """Raise TakenOver if a newer attempt has begun."""
        if self.is_passed:
            raise TakenOver(
                f"run folder {self.folder}: another attempt ({read_run(self.folder).attempt}) writes it now; this one "
                f"(attempt {self.attempt}) stops without writing any more"
            )
