"""Writes the spans of a run in the trace event format of Chrome and Perfetto, for `metronome trace`.

The format is a JSON object with a list `traceEvents` (Google, "Trace Event Format"). Here each lane is a process, each
of its rows a thread; a span is a complete event ("X") in microseconds, and a figure of a step a counter ("C"). The
profiles of a run (train.profile) have this format already: they are put on the same axis, as further processes.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import BadInput
from engine.run.files import put_in_place, read_lines
from engine.run.trace import KEPT_STEPS, Span, iterate_spans
from engine.tools.timeline import lanes_of, rows_of
from engine.types import JsonObject

COUNTERS = ("reward_mean", "tokens_per_s_per_device", "wait_s", "max_ratio_gap", "pool_size")
"""Figures of steps.jsonl that are drawn as counters, at the end of their step's update."""
MICROSECONDS = 1e6
OWN = frozenset(("lane", "name", "start", "end"))
PROFILE_MOST = 2**28
"""Most bytes of a profile, unpacked. Perfetto opens a larger one by itself."""


class WrittenTrace(NamedTuple):
    """What a trace has."""

    spans: int
    profiled: int
    """Events of profiles."""
    left_out: list[Path]
    """Profiles with more than `PROFILE_MOST` bytes."""


def write_trace(run_folder: Path, out: Path, steps: range | None = None) -> WrittenTrace:
    """Write the file, gzipped if its name ends with .gz. `steps`: only these, and what has no step, such as the state
    of an instance or an operator of a profile, as far as it lies in their time.

    Raises BadInput if the folder has no spans of these steps. Times are relative to the first span.
    """
    spans = _chosen(list(iterate_spans(run_folder / "trace")), steps)
    if not spans:
        wanted = f" of steps {steps.start} to {steps.stop - 1}" if steps is not None else ""
        raise BadInput(
            f"{run_folder}: its folder trace/ has no spans{wanted}; the newest {KEPT_STEPS:,} steps have them"
        )
    rows = {row["step"]: row for row in read_lines(run_folder / "steps.jsonl")}
    events = [*_events(spans, rows)]
    profiles = _Profiles(spans, first=1 + max(event["pid"] for event in events))
    for file in sorted((run_folder / "profile").glob("**/*.json.gz")):
        profiles.add(file, str(file.relative_to(run_folder)))
    content = {
        "traceEvents": [*events, *profiles.events],
        "displayTimeUnit": "ms",
        "otherData": {"run": run_folder.name, "began": min(span["start"] for span in spans)},
    }
    data = json.dumps(content).encode()
    partial = out.with_name(f".{out.name}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(gzip.compress(data, mtime=0) if out.suffix == ".gz" else data)
    put_in_place(partial, out)
    return WrittenTrace(len(spans), sum(event["ph"] == "X" for event in profiles.events), profiles.left_out)


class _Profiles:
    """The events of the profiles that torch wrote, in the time of the spans. Processes and threads have numbers of
    their own."""

    def __init__(self, spans: list[Span], first: int) -> None:
        """`first`: number of the next process."""
        self.events: list[JsonObject] = []
        self.left_out: list[Path] = []
        self._zero = spans[0]["start"]
        of_steps = [span for span in spans if "step" in span] or spans
        self._first = (min(span["start"] for span in of_steps) - self._zero) * MICROSECONDS
        self._last = (max(span["end"] for span in of_steps) - self._zero) * MICROSECONDS
        self._next = first

    def add(self, file: Path, name: str) -> None:
        """Add the events of a file, whose processes are named after it. Raises BadInput if it is damaged."""
        try:
            with gzip.open(file) as packed:
                data = packed.read(PROFILE_MOST + 1)
            if len(data) > PROFILE_MOST:
                self.left_out.append(file)
                return
            found = json.loads(data)
            base = found.get("baseTimeNanoseconds", 0) / 1e9 - self._zero  # their times are in microseconds from there
            numbers: dict[object, int] = {}
            for event in found["traceEvents"]:
                self._add_event(event, base * MICROSECONDS, numbers, name)
        except (EOFError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{file}: the profile is damaged ({error}); delete it, or open another run") from None

    def _add_event(self, event: JsonObject, base: float, numbers: dict[object, int], name: str) -> None:
        start = base + event["ts"]
        inside = start + event.get("dur", 0) > self._first and start < self._last
        if event["ph"] not in ("X", "M") or event["ph"] == "X" and not inside:
            return
        if event["ph"] == "M" and event["name"] not in ("process_name", "thread_name"):
            return
        process = event["pid"]
        if process not in numbers:
            numbers[process] = self._next
            self.events.append(_named("process_name", self._next, 0, {"name": f"{name}, {process}"}))
            self.events.append(_named("process_sort_index", self._next, 0, {"sort_index": self._next}))
            self._next += 1
        thread = numbers.setdefault((process, event["tid"]), len(numbers))
        if event["name"] == "thread_name" and event["ph"] == "M":
            self.events.append(_named("thread_name", numbers[process], thread, event["args"]))
        elif event["ph"] == "X":
            end = start + event["dur"]
            start = max(0.0, start)
            more = {"ts": start, "dur": end - start, "args": event.get("args", {})}
            place = {"pid": numbers[process], "tid": thread}
            self.events.append({"name": event["name"], "cat": event.get("cat", ""), "ph": "X", **more, **place})


def _chosen(spans: list[Span], steps: range | None) -> list[Span]:
    """The spans to write, sorted by start."""
    if steps is not None:
        inside = [span for span in spans if span.get("step", -1) in steps]
        first = min((span["start"] for span in inside), default=0.0)
        last = max((span["end"] for span in inside), default=0.0)
        without = [span for span in spans if "step" not in span and span["end"] > first and span["start"] < last]
        spans = [*inside, *without] if inside else []
    return sorted(spans, key=lambda span: span["start"])


def _events(spans: list[Span], rows: Mapping[int, Mapping[str, Any]]) -> Iterator[JsonObject]:
    zero = spans[0]["start"]
    by_lane: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_lane[span["lane"]].append(span)
    for process, lane in enumerate(lanes_of(spans), 1):
        yield _named("process_name", process, 0, {"name": lane})
        yield _named("process_sort_index", process, 0, {"sort_index": process})
        own = by_lane[lane]
        numbers = rows_of(own)
        for row in range(max(numbers) + 1):
            yield _named("thread_name", process, row + 1, {"name": lane if row == 0 else f"{lane} {row + 1}"})
        for span, row in zip(own, numbers, strict=True):
            yield {
                "name": span["name"],
                "cat": lane.partition("-")[0],
                "ph": "X",
                "ts": (span["start"] - zero) * MICROSECONDS,
                "dur": (span["end"] - span["start"]) * MICROSECONDS,
                "pid": process,
                "tid": row + 1,
                "args": {key: value for key, value in span.items() if key not in OWN},
            }
    yield from _counters(spans, rows, zero)


def _counters(spans: list[Span], rows: Mapping[int, Mapping[str, Any]], zero: float) -> Iterator[JsonObject]:
    """The figures of each step whose update was traced."""
    yield _named("process_name", 0, 0, {"name": "steps"})
    ends = {span["step"]: span["end"] for span in spans if span["name"] == "update" and "step" in span}
    for step, end in sorted(ends.items()):
        for name in COUNTERS:
            value = rows.get(step, {}).get(name)
            if isinstance(value, int | float):
                at = (end - zero) * MICROSECONDS
                yield {"name": name, "ph": "C", "ts": at, "pid": 0, "tid": 0, "args": {name: value}}


def _named(what: str, process: int, thread: int, arguments: JsonObject) -> JsonObject:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": arguments}
