"""Shows the progress of a stage: a bar on a terminal, occasional lines in a log file or a pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich import progress as rich
from rich.console import Console

from engine.errors import clean_line
from engine.run.progress import Progress, folder_size, format_size, read_progress
from tasks.terminal import console
from tasks.terminal.console import format_duration, say

LOOK_S = 0.5
"""Seconds between two updates."""
LONGEST_S = 60.0
"""Longest pause between two lines of a log, in seconds. The first pause is `console.QUIET_S`; each further one is twice
as long, until another line is printed."""


Look = Callable[[], Progress | None]
"""Returns the progress of a stage, or None if it is not known yet. Called from another thread."""


class _TimeLeft:
    """Estimates the remaining time from the work done since the first call with a known share."""

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None
        """Monotonic time and share of the first such call."""

    def __call__(self, share: float | None) -> str:
        if share is None or share >= 1.0:
            return ""
        now = time.monotonic()
        if self._began is None:
            self._began = (now, share)
        since, first = self._began
        if share <= first:
            return ""
        return f"  {format_duration((now - since) * (1.0 - share) / (share - first))} left"


@contextmanager
def show_progress(stage: str, look: Look) -> Iterator[None]:
    """Show the progress of a stage during the body.

    On a terminal, a bar stands below the other lines and disappears at the end. Elsewhere, a line is printed whenever
    nothing else was printed for `console.QUIET_S`.
    """
    ended = threading.Event()
    shown = _bar if console.is_terminal() else _lines
    thread = threading.Thread(target=shown, args=(stage, look, ended), name=f"progress of {stage}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _lines(stage: str, look: Look, ended: threading.Event) -> None:
    left = _TimeLeft()
    pause = console.QUIET_S
    own = console.last_line()
    while not ended.wait(min(LOOK_S, pause)):
        if console.last_line() != own:
            own = console.last_line()
            pause = console.QUIET_S
        found = look()
        if found is None:
            continue
        remaining = left(found.share)
        if time.monotonic() - own > pause:
            say(stage, f"{found.text}{remaining}")
            own = console.last_line()
            pause = min(2 * pause, LONGEST_S)


def _bar(stage: str, look: Look, ended: threading.Event) -> None:
    left = _TimeLeft()
    columns = (
        rich.TextColumn("[bold cyan]{task.description:<12}"),
        rich.BarColumn(24),
        rich.TextColumn("{task.fields[text]}", markup=False),
    )
    with rich.Progress(*columns, console=Console(), transient=True, auto_refresh=False) as bar:
        one = bar.add_task(stage, total=None, text="")
        while not ended.wait(LOOK_S):
            found = look()
            if found is None:
                continue
            total = None if found.share is None else 1.0
            bar.update(
                one, total=total, completed=found.share or 0.0, text=f"{clean_line(found.text)}{left(found.share)}"
            )
            bar.refresh()


def written(file: Path, before: str) -> Look:
    """The progress that another process writes to a file. `before`: the text before it begins to write."""
    return lambda: read_progress(file) or Progress(before)


def copied(what: str, done: Callable[[], int], size: int) -> Look:
    """The progress of a copy of `size` bytes. `done` returns the number of bytes copied so far."""

    def look() -> Progress:
        share = min(1.0, done() / size) if size else None
        return Progress(f"{what}: {format_size(done())} of {format_size(size)}", share)

    return look


def fetched(what: str, folder: Path) -> Look:
    """The progress of a download of unknown size into a folder."""
    return lambda: Progress(f"{what}: {format_size(folder_size(folder))} so far")


def since_now(what: str) -> Look:
    """The progress of work of unknown size: the time it has taken so far."""
    began = time.monotonic()
    return lambda: Progress(f"{what}: {format_duration(time.monotonic() - began)} so far")
