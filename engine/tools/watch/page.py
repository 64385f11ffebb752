"""The page of a run as one file: `timeline.html`, with its data, which opens offline, or without, for the server."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.run.files import write_atomically
from engine.run.logs import log_line
from engine.run.process import report_errors, watch_lifeline
from engine.tools.pages import assemble_page
from engine.tools.watch.run_view import RunView
from engine.types import JsonObject

HERE = Path(__file__).resolve().parent
FILE = "timeline.html"
"""Name of the page in the run folder."""
SAMPLED = 16
"""Number of steps whose conversations are in the page."""
SAMPLED_BYTES = 4 * 2**20
"""Most bytes of conversations in the page."""


def make_page(data: JsonObject | None) -> str:
    """The page. `data`: all that it shows; None: its script asks the server that it came from."""
    return assemble_page(HERE, data)


def draw_page(folder: Path) -> Path:
    """Write the page of a run that has ended into its folder. Return the file.

    It has the whole timeline, all curves, and the conversations of some steps. Raises BadInput for a damaged file.
    """
    view = RunView(folder)
    rest = view.rest()
    samples = _chosen_samples(view, rest["sampled"])
    rest["sampled"] = [name for name in rest["sampled"] if name in samples]
    data = {
        "state": view.state(live=False),
        "steps": view.steps(),
        "rest": rest,
        "timeline": view.timeline(whole=True),
        "samples": samples,
    }
    target = folder / FILE
    write_atomically(target, make_page(data))
    return target


def _chosen_samples(view: RunView, steps: Sequence[str]) -> dict[str, list[JsonObject]]:
    """The conversations of the first and the last of `RunView.rest`'s names and of some between them, by name, as far
    as there is room."""
    share = max(1, (len(steps) - 1) / (SAMPLED - 1)) if steps else 1
    chosen = dict.fromkeys(steps[round(number * share)] for number in range(min(SAMPLED, len(steps))))
    found: dict[str, list[JsonObject]] = {}
    room = SAMPLED_BYTES
    for step in sorted(chosen, key=lambda step: (step != steps[-1], step != steps[0])):
        rows = view.samples(step)
        room -= len(json.dumps(rows))
        if room < 0:
            break
        found[step] = rows
    return found


def main() -> int:
    """Draw the page of the run folder on the command line. Return the exit code."""
    watch_lifeline()
    return report_errors(lambda: log_line(str(draw_page(Path(sys.argv[1])))))


if __name__ == "__main__":
    sys.exit(main())
