"""The spans of a run on one time axis, with a legend in words: bars and lanes for the page of a run
(engine.tools.watch)."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import counted
from engine.run.trace import Span, iterate_spans, read_spans
from engine.types import JsonObject

LANES = {
    "trainer-": "a rank of the trainer: what it computes, and where it waits for groups",
    "trainer-*bubble": "the same rank, idle inside a pipelined window",
    "scorer-": "a rank of a frozen model on separate devices: which groups it scores",
    "instance-": "the responses that this rollout instance samples, a row for each that runs at the same time",
    "instances": "weights on their way to all instances",
    "pool ": "the state of an instance: whether it takes prompts",
    "verifier": "the calls of the reward",
    "programs": "the rollout program of a response, before, between and after its turns",
}
"""What a lane shows, by the beginning of its name. Other lanes are instances that joined under their own names."""

KINDS = {
    "rollout": ("#4e79a7", "a response is sampled"),
    "verify": ("#b07aa1", "a response is scored"),
    "program": ("#499894", "the program runs: tools, environment, score"),
    "wait": ("#d3d3d3", "the trainer waits for a group"),
    "train": ("#59a14f", "forward and backward pass of a window of groups"),
    "score": ("#8cd17d", "log-probabilities under the old policy or the reference"),
    "evaluate": ("#edc948", "a benchmark is sampled"),
    "bubble": ("#bab0ac", "idle between the micro-batches of a pipeline"),
    "update": ("#f28e2b", "gradients are reduced and the optimizer makes its step"),
    "sync": ("#e15759", "new weights go to the instances"),
    "check": ("#d37295", "trainer and instances compare log-probabilities of fixed tokens"),
    "checkpoint": ("#9c755f", "the state is copied for a checkpoint"),
    "serving": ("#a0cbe8", "takes prompts"),
    "updating": ("#ff9d9a", "gets weights, takes no prompts"),
    "starting": ("#f1ce63", "loads its model"),
    "draining": ("#d4a6c8", "finishes its responses and leaves"),
    "out": ("#79706e", "does not answer, takes no prompts"),
}
"""The colour of a bar and what it shows, by its name."""
COLORS = {name: color for name, (color, _) in KINDS.items()}
"""Colours by the name of the span; other spans have that of the text."""


def lane_text(name: str) -> str:
    """What the lane shows."""
    if name.startswith("trainer-") and name.endswith(" bubble"):
        return LANES["trainer-*bubble"]
    return next((text for start, text in LANES.items() if name.startswith(start)), LANES["instance-"])


def legend_entries(lanes: Iterable[str], kinds: Iterable[str]) -> list[tuple[str, str]]:
    """(name, meaning) of the lanes and then of the bars of a page. Lanes with the same meaning share one entry."""
    shared: dict[str, list[str]] = {}
    for name in lanes:
        shared.setdefault(lane_text(name), []).append(name)
    named = [(names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}", text) for text, names in shared.items()]
    return [*named, *((kind, KINDS[kind][1]) for kind in kinds if kind in KINDS)]


WINDOW_STEPS = 3
"""Number of visible steps when the page opens."""
MOST_SPANS = 100_000
"""Largest number of spans that are drawn one by one. With more, a page takes seconds to open, and the whole run no
longer fits into memory."""
MOST_BARS = 100_000
"""Largest number of bars for steps outside the window in which the page opens. Each takes about 1 KiB of memory."""
MOST_STEPS = 2**20
"""Number of steps in a block up to which bars are merged further; beyond it only lanes and names are left."""


def whole_run(trace: Path, sizes: Mapping[int, int]) -> JsonObject:
    """The timeline of a run's trace folder for the page (engine.tools.watch). `sizes`: pool_size of finished steps.

    The trace is read as a stream, because that of a long run has gigabytes. With more than `MOST_SPANS` spans, each
    step outside the window in which the page opens has one bar per name and lane. If there would be more than
    `MOST_BARS`, several steps share one.
    """
    outline = _Outline()
    for span in iterate_spans(trace):
        outline.add(span)
    spans = read_spans(trace) if outline.count <= MOST_SPANS else _thinned(iterate_spans(trace), outline.shown())
    return content_of(spans, sizes, _overlaps(outline, iterate_spans(trace)))


class _Outline:
    """What the page needs to know about the whole trace before spans are chosen."""

    def __init__(self) -> None:
        self.count = 0
        self.starts: dict[int, float] = {}
        """By step: start of its weight sync on the trainer; for a repeated step, the last one."""
        self.ends: dict[int, float] = {}
        """By step: end of its update."""

    def add(self, span: Span) -> None:
        """Add a span."""
        self.count += 1
        if span["name"] == "sync" and span["lane"] != "instances":
            self.starts[span["step"]] = max(span["start"], self.starts.get(span["step"], 0.0))
        elif span["name"] == "update":
            self.ends[span["step"]] = max(span["end"], self.ends.get(span["step"], 0.0))

    def shown(self) -> set[int]:
        """The steps in which the page opens, and one step before and after them."""
        steps = sorted(self.starts, key=lambda step: self.starts[step])
        first = max(0, len(steps) // 2 - WINDOW_STEPS // 2 - 1)
        return set(steps[first : first + WINDOW_STEPS + 2])


def _thinned(spans: Iterable[Span], shown: Collection[int]) -> list[Span]:
    """The spans of the steps `shown` and those without a step. All other spans of a name in a lane become one. Sorted
    by start."""
    kept: list[Span] = []
    others = _Merged(max(shown, default=0))
    for span in spans:
        if span.get("step") is None or span["step"] in shown:
            kept.append(span)
        else:
            others.add(span)
    return sorted([*kept, *others.spans.values()], key=lambda span: span["start"])


class _Merged:
    """Merges all spans of a name in a lane in a block of steps into one span. Blocks have one step until there are too
    many; then their size doubles. No merged span covers both sides of the visible steps."""

    def __init__(self, shown: int) -> None:
        """`shown`: one of the visible steps."""
        self._shown = shown
        self._steps = 1
        """Number of steps in a block."""
        self.spans: dict[tuple[str, str, int, bool], Span] = {}

    def add(self, span: Span) -> None:
        """Add a span."""
        step = span["step"]
        place = (span["lane"], span["name"], step // self._steps, step < self._shown)
        whole = self.spans.setdefault(place, {**span})
        whole["step"] = min(whole["step"], step)
        whole["start"] = min(whole["start"], span["start"])
        whole["end"] = max(whole["end"], span["end"])
        whole.pop("group", None)
        whole.pop("groups", None)
        if len(self.spans) > MOST_BARS and self._steps < MOST_STEPS:
            self._steps *= 2
            smaller = list(self.spans.values())
            self.spans = {}
            for each in smaller:
                self.add(each)


def overlapped_steps(spans: Sequence[Span]) -> dict[int, bool]:
    """For each step, whether its first train span starts before its last rollout ends.

    Rollouts outside the time of the step (first sync … update) belong to an evaluation and do not count.
    """
    outline = _Outline()
    for span in spans:
        outline.add(span)
    return _overlaps(outline, spans)


def _overlaps(outline: _Outline, spans: Iterable[Span]) -> dict[int, bool]:
    trained: dict[int, float] = {}
    rolled: dict[int, float] = {}
    for span in spans:
        step = span.get("step", -1)
        if outline.starts.get(step, math.inf) <= span["start"] <= outline.ends.get(step, -math.inf):
            if span["name"] == "train":
                trained[step] = min(span["start"], trained.get(step, math.inf))
            elif span["name"] == "rollout":
                rolled[step] = max(span["end"], rolled.get(step, -math.inf))
    return {step: trained[step] < rolled[step] for step in sorted(trained.keys() & rolled.keys())}


def step_starts(spans: Iterable[Span]) -> list[tuple[int, float]]:
    """(step, start of its weight sync on the trainer) in order of time. For a repeated step, the last time counts."""
    starts = {span["step"]: span["start"] for span in spans if span["name"] == "sync" and span["lane"] != "instances"}
    return sorted(starts.items(), key=lambda item: item[1])


def lanes_of(spans: Sequence[Span]) -> list[str]:
    """The lanes in order: trainers, scorers, instances, the weight sync in the instances, the pool, verifiers, the
    rest."""
    order = ("trainer", "scorer-", "instance-", "instances", "pool ", "verifier")
    found = {span["lane"] for span in spans}

    def rank(lane: str) -> tuple[int, str]:
        return next((place for place, prefix in enumerate(order) if lane.startswith(prefix)), len(order)), lane

    return sorted(found, key=rank)


def rows_of(spans: Sequence[Span]) -> list[int]:
    """A row number for each span of a lane (sorted by start). Spans in a row do not overlap, and there are as few rows
    as possible."""
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


def content_of(
    spans: Sequence[Span], sizes: Mapping[int, int], overlaps: Mapping[int, bool] | None = None
) -> JsonObject:
    """The data for the page's script, with times in seconds from the first span, which are sorted by start. `sizes`:
    pool_size of finished steps. `overlaps`: from `overlapped_steps`, with which the page opens in the middle of the run
    instead of showing all spans."""
    zero = min((span["start"] for span in spans), default=0.0)
    end = max((span["end"] for span in spans), default=1.0) - zero
    starts = [(step, start - zero) for step, start in step_starts(spans)]
    lanes, bars = _bars(spans, zero)
    kinds = _kinds(spans)
    return {
        "summary": "" if overlaps is None else _summary(overlaps),
        "kinds": [{"name": kind, "color": COLORS.get(kind, "")} for kind in kinds],
        "legend": legend_entries((lane for lane, _ in lanes), kinds),
        "lanes": lanes,
        "spans": bars,
        "steps": [(step, start, sizes.get(step)) for step, start in starts],
        "zero": zero,
        "end": end,
        "window": (0.0, end) if overlaps is None else _window([start for _, start in starts], end),
    }


def _bars(spans: Sequence[Span], zero: float) -> tuple[list[tuple[str, int]], list[list[Any]]]:
    """(lane, number of rows) and [lane, row, kind, start, length, step, group] of every span."""
    lanes: list[tuple[str, int]] = []
    bars: list[list[Any]] = []
    by_lane: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_lane[span["lane"]].append(span)
    for number, lane in enumerate(lanes_of(spans)):
        own = by_lane[lane]
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


def _summary(steps: Mapping[int, bool]) -> str:
    if not steps:
        return "No step was finished."
    return (
        f"In {sum(steps.values()):,} of {counted(len(steps), 'step')} ({sum(steps.values()) / len(steps):.0%}) "
        "training starts before the step's last rollout ends."
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
