"""The page of a run as one file: `timeline.html`, with its data, which opens offline, or without, for the server.

The curves are uPlot's (MIT, its licence is beside it; 51 KB). The page's policy lets no other script run than these
two, so that nothing that a model wrote becomes one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from engine.run.files import encode_for_page, write_atomically
from engine.run.logs import log_line
from engine.run.process import report_errors, watch_lifeline
from engine.tools.watch.run_view import RunView
from engine.types import JsonObject

HERE = Path(__file__).resolve().parent
FILE = "timeline.html"
"""Name of the page in the run folder."""
SAMPLED = 16
"""Number of steps whose conversations are in the page."""
SAMPLED_BYTES = 4 * 2**20
"""Most bytes of conversations in the page."""


@cache
def _parts() -> tuple[str, str, str]:
    """The page with its style, but without scripts and data; uPlot; the page's script."""
    page, style, script, plot, plot_style = (
        (HERE / name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css", "page.js", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css")
    )
    return page.replace("/*STYLE*/", plot_style + style), plot, script


def make_page(data: JsonObject | None) -> str:
    """The page. `data`: all that it shows; None: its script asks the server that it came from."""
    page, plot, script = _parts()
    hashes = " ".join(f"'sha256-{_digest(one)}'" for one in (plot, script))
    content = "null" if data is None else encode_for_page(data)
    return (
        page.replace("HASHES", hashes)
        .replace("/*UPLOT*/", plot, 1)
        .replace("/*SCRIPT*/", script, 1)
        .replace("/*DATA*/", content, 1)
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def draw_page(folder: Path) -> Path:
    """Write the page of a run that has ended into its folder. Return the file.

    It has the whole timeline, all curves, and the conversations of some steps. Raises BadInput for a damaged file.
    """
    view = RunView(folder)
    rest = view.rest()
    samples = _chosen_samples(view, rest["sampled"])
    rest["sampled"] = sorted(map(int, samples))
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


def _chosen_samples(view: RunView, steps: Sequence[int]) -> dict[str, list[JsonObject]]:
    """The conversations of the first and the last step and of steps between them, by step, as far as there is room."""
    share = max(1, (len(steps) - 1) / (SAMPLED - 1)) if steps else 1
    chosen = dict.fromkeys(steps[round(number * share)] for number in range(min(SAMPLED, len(steps))))
    found: dict[str, list[JsonObject]] = {}
    room = SAMPLED_BYTES
    for step in sorted(chosen, key=lambda step: (step != steps[-1], step != steps[0], step)):
        rows = view.samples(step)
        room -= len(json.dumps(rows))
        if room < 0:
            break
        found[str(step)] = rows
    return found


def main() -> int:
    """Draw the page of the run folder on the command line. Return the exit code."""
    watch_lifeline()
    return report_errors(lambda: log_line(str(draw_page(Path(sys.argv[1])))))


if __name__ == "__main__":
    sys.exit(main())
