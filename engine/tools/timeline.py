"""Draws the spans of a run on one time axis: `timeline.html`, one file that opens offline.

It uses a canvas and 150 lines of script, because plotly's script has 4.8 MB and is slow with 30,000 spans.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.run.files import read_lines, write_atomically
from engine.run.trace import Span, read_spans

COLORS = {
    "rollout": "#4e79a7",
    "verify": "#b07aa1",
    "wait": "#d3d3d3",
    "train": "#59a14f",
    "score": "#8cd17d",
    "evaluate": "#edc948",
    "bubble": "#bab0ac",
    "update": "#f28e2b",
    "sync": "#e15759",
    "check": "#d37295",
    "checkpoint": "#9c755f",
    "serving": "#a0cbe8",
    "updating": "#ff9d9a",
    "starting": "#f1ce63",
    "draining": "#d4a6c8",
    "silent": "#79706e",
}
"""Colours by the name of the span; other spans are black."""
WINDOW_STEPS = 3
"""Number of visible steps when the page opens."""


def draw(run_folder: Path) -> Path:
    """Write `<run_folder>/timeline.html` from its trace and return the path. An empty trace gives an empty page."""
    spans = read_spans(run_folder / "trace")
    sizes = {line["step"]: line["pool_size"] for line in read_lines(run_folder / "steps.jsonl")}
    target = run_folder / "timeline.html"
    content = json.dumps(_content(run_folder.name, spans, sizes), separators=(",", ":")).replace("</", "<\\/")
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    write_atomically(target, template.replace("/*DATA*/null", content))
    return target


def overlapped(spans: Sequence[Span]) -> dict[int, bool]:
    """For each step, whether its first train span starts before its last rollout ends.

    Rollouts outside the time of the step (first sync … update) belong to an evaluation and do not count.
    """
    starts = dict(step_starts(spans))
    ends = {span["step"]: span["end"] for span in spans if span["name"] == "update"}
    trained: dict[int, list[float]] = {step: [] for step in starts.keys() & ends.keys()}
    rolled: dict[int, list[float]] = {step: [] for step in trained}
    for span in spans:
        step = span.get("step")
        if step in trained and starts[step] <= span["start"] <= ends[step]:
            if span["name"] == "train":
                trained[step].append(span["start"])
            elif span["name"] == "rollout":
                rolled[step].append(span["end"])
    return {step: min(trained[step]) < max(rolled[step]) for step in sorted(trained) if trained[step] and rolled[step]}


def step_starts(spans: Iterable[Span]) -> list[tuple[int, float]]:
    """(step, start of its weight sync on the trainer) in order of time. For a repeated step the last time counts."""
    starts = {span["step"]: span["start"] for span in spans if span["name"] == "sync" and span["lane"] != "instances"}
    return sorted(starts.items(), key=lambda item: item[1])


def lanes_of(spans: Sequence[Span]) -> list[str]:
    """The lanes in order: trainers, instances, the weight sync in the instances, the pool, verifiers, the rest."""
    order = ("trainer", "instance-", "instances", "pool ", "verifier")
    found = {span["lane"] for span in spans}

    def rank(lane: str) -> tuple[int, str]:
        return next((place for place, prefix in enumerate(order) if lane.startswith(prefix)), len(order)), lane

    return sorted(found, key=rank)


def rows_of(spans: Sequence[Span]) -> list[int]:
    """A row number for each span of a lane (sorted by start). Spans in a row do not overlap, and there are few rows."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    rows = []
    for span in spans:
        while busy and busy[0][0] <= span["start"]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span["end"], row))
        rows.append(row)
    return rows


def _content(name: str, spans: Sequence[Span], sizes: Mapping[int, int]) -> dict[str, Any]:
    """The data for the page's script, with times in seconds from the first span. `sizes`: pool_size of finished
    steps."""
    zero = min((span["start"] for span in spans), default=0.0)
    end = max((span["end"] for span in spans), default=1.0) - zero
    starts = [(step, start - zero) for step, start in step_starts(spans)]
    lanes, bars = _bars(spans, zero)
    return {
        "title": f"{name}: timeline",
        "summary": _summary(overlapped(spans)),
        "kinds": [{"name": kind, "color": COLORS.get(kind, "#000000")} for kind in _kinds(spans)],
        "lanes": lanes,
        "spans": bars,
        "steps": [(step, start, sizes.get(step)) for step, start in starts],
        "end": end,
        "window": _window([start for _, start in starts], end),
    }


def _bars(spans: Sequence[Span], zero: float) -> tuple[list[tuple[str, int]], list[list[Any]]]:
    """(lane, number of rows) and [lane, row, kind, start, length, step, group] of every span."""
    lanes: list[tuple[str, int]] = []
    bars: list[list[Any]] = []
    for number, lane in enumerate(lanes_of(spans)):
        own = [span for span in spans if span["lane"] == lane]
        rows = rows_of(own)
        lanes.append((lane, max(rows) + 1))
        bars += [
            [
                number,
                row,
                span["name"],
                round(span["start"] - zero, 5),
                round(span["end"] - span["start"], 5),
                span.get("step"),
                span.get("group", span.get("groups")),
            ]
            for span, row in zip(own, rows, strict=True)
        ]
    return lanes, bars


def _kinds(spans: Sequence[Span]) -> list[str]:
    found = {span["name"] for span in spans}
    return [kind for kind in COLORS if kind in found] + sorted(found - COLORS.keys())


def _summary(steps: dict[int, bool]) -> str:
    if not steps:
        return "No step was finished."
    return (
        f"In {sum(steps.values())} of {len(steps)} steps ({sum(steps.values()) / len(steps):.0%}) training starts "
        "before the step's last rollout ends."
    )


def _window(starts: Sequence[float], end: float) -> tuple[float, float]:
    """The start and end of three steps in the middle of the run, with a small margin; the whole run if it is
    shorter."""
    if len(starts) <= WINDOW_STEPS:
        return 0.0, end
    first = max(0, len(starts) // 2 - WINDOW_STEPS // 2)
    left = starts[first]
    right = [*starts, end][first + WINDOW_STEPS]
    return left - 0.02 * (right - left), right + 0.02 * (right - left)
