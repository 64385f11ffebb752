"""Spans of every process of a run, one JSON line each. `engine.tools.timeline` puts them on one time axis."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict, cast

from engine.errors import BadInput
from engine.run.files import append_lines, parse_line, put_in_place, read_lines

TAIL = 64 * 2**20
"""Most bytes that are read of the end of a file, for the last steps."""


class _Attributes(TypedDict, total=False):
    step: int
    group: int
    groups: list[int]
    number: int
    """In "rollout": the response's number in its group."""
    prompt_tokens: int
    """In "rollout"."""
    tokens: int
    """In "rollout": tokens that this request sampled. In "train": prompt and response tokens of all responses."""
    version: int
    """In "rollout": weight version of the last of these tokens; absent if there are none."""
    computed_tokens: int
    """In "train": tokens in the rows of the micro-batches that this rank computed. A shared prompt counts once."""
    micro_batches: int
    """In "train"."""
    bytes: int
    """In "sync" on the trainer: bytes of weights that this rank sent."""


class Span(_Attributes):
    """A line of a trace. Each kind of span has some of the attributes; further ones are only for people to read."""

    lane: str
    """The row in which it is drawn."""
    name: str
    start: float
    """Seconds since the epoch, like `end`."""
    end: float


KEPT_STEPS = 1000
"""Number of newest steps whose spans (up to twice as many), response samples and tables of evaluations during the
training are kept. The figures of older steps stay."""


class Trace:
    """Appends spans of one process to `<folder>/<role>.jsonl`. Times are seconds since the epoch.

    Lines are buffered and written by `flush`, once a step, so a span costs microseconds.
    """

    def __init__(self, folder: Path, role: str, keep_steps: int = KEPT_STEPS) -> None:
        """`keep_steps`: number of newest steps whose spans are kept. A file with the spans of so many steps becomes
        `<role>.earlier.jsonl` and replaces the one before it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.role = role
        self._path = folder / f"{role}.jsonl"
        self._lines: list[str] = []
        self._keep_steps = keep_steps
        self._first: int | None = None
        """The first step in the file; None: not read yet."""
        self._newest = 0

    def add_span(self, name: str, start: float, end: float, lane: str = "", **attributes: Any) -> None:  # noqa: ANN401
        """Record a span that has ended. `lane`: name of the row in which it is drawn (default: the role)."""
        span = {"lane": lane or self.role, "name": name, "start": start, "end": end, **attributes}
        self._lines.append(json.dumps(span))
        self._newest = max(self._newest, attributes.get("step", 0))

    @contextlib.contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
        """Record the body as a span, even if it raises. The body gets the attributes, and may add to them."""
        start = time.time()
        try:
            yield attributes
        finally:
            self.add_span(name, start, time.time(), **attributes)

    def flush(self) -> None:
        """Write the spans since the last flush. On a full disk (OSError) the file is unchanged."""
        if self._lines:
            if self._path.exists():
                self._put_aside()
            append_lines(self._path, self._lines)
            self._lines.clear()

    def _put_aside(self) -> None:
        """Begin a new file if this one has the spans of enough steps."""
        if self._first is None:
            with contextlib.suppress(BadInput):  # a damaged line stops no run: the steps count from now on
                steps = (span.get("step") for span in read_lines(self._path))
                self._first = next((step for step in steps if step is not None), None)
            self._first = self._newest if self._first is None else self._first
        if self._newest - self._first >= self._keep_steps:
            self._path.replace(self._path.with_suffix(".earlier.jsonl"))
            self._first = None


def iterate_spans(folder: Path) -> Iterator[Span]:
    """The spans in a run's trace folder, file by file. A torn last line is skipped."""
    return (span for path in sorted(folder.glob("*.jsonl")) for span in read_lines(path))


def read_spans(folder: Path) -> list[Span]:
    """All spans in a run's trace folder, sorted by start; gigabytes for a long run."""
    return sorted(iterate_spans(folder), key=lambda span: span["start"])


def last_spans(folder: Path, first: int) -> list[Span]:
    """The spans of the steps from `first` on, sorted by start, from the ends of the files of a trace that processes
    still write. Those without a step begin with them at the earliest. At most `TAIL` bytes of each file are read.
    Raises BadInput for a damaged line."""
    paths = [path for path in sorted(folder.glob("*.jsonl")) if not path.stem.endswith(".earlier")]
    found = [span for path in paths for span in _tail(path, first) if span.get("step", first) >= first]
    begin = min((span["start"] for span in found if "step" in span), default=0.0)
    cut: list[Span] = [{**span, "start": max(span["start"], begin)} for span in found if span["end"] > begin]
    return sorted(cut, key=lambda span: span["start"])


def _tail(path: Path, first: int) -> list[Span]:
    """The spans at the end of a file, from before the step `first` on if it has some."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        length = min(size, TAIL // 64)
        while True:
            file.seek(size - length)
            whole = file.read(length).rpartition(b"\n")[0]
            lines = whole.split(b"\n") if whole else []
            if length < size:
                del lines[:1]  # its beginning may be missing
            spans = [parse_span(path, line) for line in lines]
            if length == min(size, TAIL) or any(span.get("step", first) < first for span in spans):
                return spans
            length = min(size, TAIL, 4 * length)


def parse_span(path: Path, line: bytes) -> Span:
    """A line of a trace. Raises BadInput if it is damaged."""
    try:
        return cast(Span, parse_line(path, 0, line))
    except BadInput:
        raise BadInput(f"{path}: a line near its end is damaged; truncate the file before this line") from None


def cut_spans(path: Path, before: int, dry: bool = False) -> int:
    """Remove the spans of steps before `before` from a file of a trace to which nobody writes. Return their bytes.
    `dry`: only count."""
    partial = path.with_name(f".{path.name}.partial")
    size = 0
    with path.open("rb") as source, (Path(os.devnull) if dry else partial).open("wb") as kept:
        for line, span in zip(source, read_lines(path), strict=False):
            if span.get("step", before) < before:
                size += len(line)
            else:
                kept.write(line)
    if not dry:
        put_in_place(partial, path)
    return size
