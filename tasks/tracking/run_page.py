"""Draws the page of a run when its last stage has ended."""

from __future__ import annotations

import shlex

from engine.errors import MetronomeError
from engine.run.commands import timeline_command
from engine.run.folder import RunFolder
from engine.run.process import Child, run_to_end
from tasks.terminal.console import print_error

DRAW_S = 120.0
"""Longest time in seconds to draw the page."""
HURRY_S = 5.0
"""The same after a signal, when a person or a worker waits."""


def draw_at_end(folder: RunFolder, within_s: float = DRAW_S) -> None:
    """Draw timeline.html in a process of its own, after everything that it shows was written. Nothing is drawn for a
    run that has neither a timeline nor an evaluation, or if another process writes the folder now."""
    if folder.fence.is_passed or not (folder.evaluations.exists() or any(folder.trace.glob("*.jsonl"))):
        return
    log = folder.logs / "timeline.log"
    child = Child("timeline", timeline_command(folder.path), log)
    try:
        run_to_end(child, within_s, f"it took more than {within_s:g} s", grace_s=0.0)
    except MetronomeError as error:
        command = shlex.join(timeline_command(folder.path))
        print_error(f"warning: the timeline is not drawn: {error}; draw it: {command}")
    finally:
        log.unlink(missing_ok=True)
