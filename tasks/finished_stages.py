"""The finished stages of a run, stored in its run folder. A resumed run does not repeat them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from engine.errors import MetronomeError
from engine.run.checkpoint_files import latest_checkpoint, step_of
from engine.run.files import append_line, read_json, read_lines, write_json
from engine.run.folder import RunFolder

Result = TypeVar("Result")


class Stages:
    """The finished stages of a run by name, each with its result (any value that JSON can store)."""

    def __init__(self, folder: RunFolder) -> None:
        self._fence = folder.fence
        self._file = folder.stages
        repair = "delete it to repeat finished stages"
        self.done = read_json(self._file, "which stages are done", repair) if self._file.exists() else {}

    def once(self, name: str, work: Callable[[], Result]) -> Result:
        """Return the stored result of a stage. If the stage is not done, run `work` now and store its result.

        Raises TakenOver if another flow writes the run.
        """
        if name not in self.done:
            self._fence.check()
            self.done[name] = work()
            self._write()
        found: Result = self.done[name]
        return found

    def forget(self, *names: str) -> None:
        """Remove stages, so that they run again."""
        self.done = {name: result for name, result in self.done.items() if name not in names}
        self._write()

    def _write(self) -> None:
        self._fence.check()
        write_json(self._file, self.done)


def count_attempt(folder: RunFolder, what: str, limit: int, why: str, by_hand: bool = False) -> int:
    """Record a start of the flow or of its training (`what`). `why`: what ended the previous one.

    Return the number of earlier starts from the same point. Raises MetronomeError if that number exceeds `limit`, the
    number of resumes in a row that may pass without a new stage or checkpoint. A start by a person (`by_hand`) resets
    the count.
    """
    here = progress(folder)
    starts = 0 if by_hand else _starts_from(folder, what, here)
    if starts > limit:
        raise MetronomeError(
            f"the {what} of run {folder.path.name} was started {starts} times from the same point ({_named(here)}) "
            f"and got no further; not resumed again (run.resumes = {limit}). Last failure: {why}"
        )
    folder.fence.check()
    append_line(folder.attempts, {"at": time.time(), "what": what, "progress": here, "why": why, "by_hand": by_hand})
    return starts


def progress(folder: RunFolder) -> list[int]:
    """The progress of a run: number of finished stages, and step of its newest complete checkpoint (-1: none)."""
    checkpoint = latest_checkpoint(folder.checkpoints)
    return [len(Stages(folder).done), -1 if checkpoint is None else step_of(checkpoint)]


def _starts_from(folder: RunFolder, what: str, here: list[int]) -> int:
    """The number of latest consecutive starts of `what` from the point `here`, counted since a person last started the
    run."""
    starts = 0
    for row in reversed(list(read_lines(folder.attempts))):
        starts += row["what"] == what and row["progress"] == here
        if row["by_hand"] or (row["what"] == what and row["progress"] != here):
            break
    return starts


def last_end(folder: RunFolder) -> str:
    """Why the last attempt of the run ended, as far as is known."""
    if (told := folder.last_failure()) is not None:
        return told[1]
    return "its process died without a message (killed, out of memory, or its node was lost)"


def _named(here: list[int]) -> str:
    stages, step = here
    return f"{stages} stages done, " + (f"checkpoint after {step} steps" if step >= 0 else "no checkpoint")
