"""What a run has behind it, kept in its run folder: a stage that is done is not done again when the run is resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from engine.errors import MetronomeError
from engine.run.checkpoint_files import latest, step_of
from engine.run.files import append_line, read_lines, write_atomically
from engine.run.folder import RunFolder

Result = TypeVar("Result")


class Stages:
    """The finished stages of a run by name, each with its result (anything that JSON keeps)."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = folder.stages
        self.done: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def once(self, name: str, work: Callable[[], Result]) -> Result:
        """The stage's result, from when it was done; else its work is done now."""
        if name not in self.done:
            self.done[name] = work()
            self._write()
        found: Result = self.done[name]
        return found

    def forget(self, *names: str) -> None:
        """Let stages be done again."""
        self.done = {name: result for name, result in self.done.items() if name not in names}
        self._write()

    def _write(self) -> None:
        write_atomically(self._file, json.dumps(self.done, indent=1))


def count_attempt(folder: RunFolder, what: str, limit: int, why: str, by_hand: bool = False) -> None:
    """Keep a record of a start of the flow or of its training (`what`). `why`: what ended the one before.

    Raises MetronomeError if it would be more than `limit` resumes in a row without a stage or a checkpoint between
    them; a person's own start (`by_hand`) begins a new count.
    """
    here = progress(folder)
    starts = 0 if by_hand else _starts_from(folder, what, here)
    if starts > limit:
        raise MetronomeError(
            f"the {what} of run {folder.path.name} was started {starts} times from the same point "
            f"({_named(here)}) and got no further; not resumed again (run.resumes = {limit}). What ended it "
            f"last: {why}"
        )
    append_line(folder.attempts, {"at": time.time(), "what": what, "progress": here, "why": why, "by_hand": by_hand})


def progress(folder: RunFolder) -> list[int]:
    """How far a run is: stages done, and the step of its newest complete checkpoint (-1: none)."""
    checkpoint = latest(folder.checkpoints)
    return [len(Stages(folder).done), -1 if checkpoint is None else step_of(checkpoint)]


def _starts_from(folder: RunFolder, what: str, here: list[int]) -> int:
    """Starts of it in a row, up to now, from this point; since a person started the run."""
    starts = 0
    for row in reversed(list(read_lines(folder.attempts))):
        starts += row["what"] == what and row["progress"] == here
        if row["by_hand"] or (row["what"] == what and row["progress"] != here):
            break
    return starts


def last_end(folder: RunFolder) -> str:
    """Why the run has to be started again, as far as it is known."""
    if folder.failure.exists():
        return str(json.loads(folder.failure.read_text())["message"])
    return "its process died without a word (killed, out of memory, or its node was lost)"


def _named(here: list[int]) -> str:
    stages, step = here
    return f"{stages} stages done, " + (f"checkpoint of step {step}" if step >= 0 else "no checkpoint")
