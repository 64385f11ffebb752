"""Draws some steps of runs on one time axis as an SVG.

`python docs/draw_timeline.py RUN [RUN ...] > docs/images/timeline.svg`

RUN is a run folder with its trace. Each run is a panel: its instances' responses above, the trainer below.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from engine.run.files import read_lines
from engine.run.trace import read_spans
from engine.tools.timeline import COLORS, rows_of, step_starts

WIDTH = 960
LEFT = 96
RIGHT = 12
ROW = 4
TRAINER = 26
HEAD = 26
GAP = 14
MEANING = {"rollout": "a response is sampled", "train": "a group is trained", "wait": "waiting", "sync": "weight sync"}
"""Legend, by the span's name."""


class Panel:
    """One run's spans within the steps that are drawn."""

    def __init__(self, run: Path, steps: list[int]) -> None:
        spans = read_spans(run / "trace")
        starts = dict(step_starts(spans))
        self.name = run.name
        self.seconds = [row["step_s"] for row in read_lines(run / "steps.jsonl") if row["step"] in steps]
        self.start = starts[steps[0]]
        self.end = max(span["end"] for span in spans if span["name"] == "update" and span["step"] == steps[-1])
        inside = [span for span in spans if span["start"] >= self.start and span["end"] <= self.end + 0.5]
        self.boundaries = [starts[step] for step in steps]
        self.rollouts = sorted((s for s in inside if s["name"] == "rollout"), key=lambda span: span["start"])
        self.rows = rows_of(self.rollouts)
        self.trainer = [s for s in inside if s["lane"] == "trainer-0" and s["name"] in COLORS]

    @property
    def height(self) -> int:
        """Pixels."""
        return HEAD + (max(self.rows) + 1) * ROW + GAP + TRAINER + GAP


def bar(x: float, y: float, width: float, height: float, color: str) -> str:
    """A rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{height:.1f}" fill="{color}"/>'


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'


def panel(drawn: Panel, top: float, scale: float) -> Iterator[str]:
    """A run's part of the picture."""

    def at(moment: float) -> float:
        return LEFT + (moment - drawn.start) * scale

    seconds = ", ".join(f"{value:.1f} s" for value in drawn.seconds)
    yield text(LEFT, top + 15, f"{drawn.name}: steps of {seconds}", 14)
    lanes = top + HEAD
    below = lanes + (max(drawn.rows) + 1) * ROW + GAP
    yield text(LEFT - 8, (lanes + below - GAP) / 2 + 4, "instance", anchor="end")
    yield text(LEFT - 8, below + TRAINER / 2 + 4, "trainer", anchor="end")
    for span, row in zip(drawn.rollouts, drawn.rows, strict=True):
        yield bar(
            x=at(span["start"]),
            y=lanes + row * ROW,
            width=(span["end"] - span["start"]) * scale,
            height=ROW - 1,
            color=COLORS["rollout"],
        )
    for span in drawn.trainer:
        yield bar(
            x=at(span["start"]),
            y=below,
            width=(span["end"] - span["start"]) * scale,
            height=TRAINER,
            color=COLORS[span["name"]],
        )
    for boundary in drawn.boundaries:
        x = f"{at(boundary):.1f}"
        yield f'<line x1="{x}" x2="{x}" y1="{lanes - 4}" y2="{below + TRAINER + 4}" stroke="#222"/>'


def legend(y: float) -> Iterator[str]:
    """What the colours mean."""
    x = float(LEFT)
    for kind, meaning in MEANING.items():
        yield bar(x=x, y=y - 9, width=12, height=10, color=COLORS[kind])
        yield text(x + 17, y, meaning)
        x += 170


def draw(panels: list[Panel]) -> str:
    """The whole picture; all panels share the scale."""
    scale = (WIDTH - LEFT - RIGHT) / max(drawn.end - drawn.start for drawn in panels)
    parts: list[str] = []
    top = 6.0
    for drawn in panels:
        parts += panel(drawn, top, scale)
        top += drawn.height + GAP
    parts += legend(top + 6)
    size = f'width="{WIDTH}" height="{top + 16:.0f}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {top + 16:.0f}" font-family="sans-serif">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def arguments() -> Any:  # noqa: ANN401
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 2])
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    sys.stdout.write(draw([Panel(run, given.steps) for run in given.runs]))
