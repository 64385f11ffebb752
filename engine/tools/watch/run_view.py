"""What the page of a run shows, read from the run folder alone, which it leaves as it is.

Each part is JSON for the page's script (page.js). Files that grow are read from where the last reading ended, so a long
run costs no more than a short one.
"""

from __future__ import annotations

import math
import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from engine.errors import BadInput, counted
from engine.run.files import parse_line, read_json, read_lines
from engine.run.lock import is_held
from engine.run.progress import read_progress
from engine.run.run_file import read_run
from engine.run.trace import last_spans
from engine.tools.timeline import COLORS, content_of, whole_run
from engine.types import JsonObject

RECENT = 20
"""Number of steps whose mean time predicts the time left."""
BEAT_S = 30.0
"""A training whose progress was written within so many seconds goes on, also on another machine."""
LIVE_STEPS = 4
"""Number of newest steps on the timeline of a run that goes on."""
NOTICES = 300
"""Number of newest warnings."""
CHANGES = 200
"""Number of newest states of an instance in the history of the pool."""
ACCURACY = ("benchmark", "weight_version", "avg_at_k", "ci_low", "ci_high", "problems", "samples", "partial_scores")
"""The parts of an evaluation that the page shows."""


class GrowingLines:
    """The JSON lines of a file that other processes append to. A file that was replaced is read anew."""

    def __init__(self, path: Path, part: bytes = b"") -> None:
        """`part`: only lines with these bytes are read."""
        self.path = path
        self.rows: list[JsonObject] = []
        self.of = 0
        """Number of the file; another one after it was replaced. Below 2**53, up to which a page's numbers are exact;
        inode numbers of Lustre and the like are above."""
        self._part = part
        self._position = 0
        self._lines = 0

    def read(self) -> list[JsonObject]:
        """Read the new complete lines, and return all. Raises BadInput for a damaged line."""
        if not self.path.exists():
            self._begin(0)
            return self.rows
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            number = status.st_ino % 2**53
            if number != self.of or status.st_size < self._position:
                self._begin(number)
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                row = parse_line(self.path, self._lines + 1, line) if self._part in line else None
                self._lines += 1
                self._position += len(line)
                if row is not None:
                    self.rows.append(row)
        return self.rows

    def _begin(self, of: int) -> None:
        self.rows = []
        self.of = of
        self._position = 0
        self._lines = 0


class RunView:
    """The parts of the page of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps_file = GrowingLines(folder / "steps.jsonl")
        self._evaluations = GrowingLines(folder / "evaluations.jsonl")
        self._notices = GrowingLines(folder / "logs/notices.jsonl")
        self._pool = [
            GrowingLines(folder / f"trace/{name}.jsonl", b'"lane": "pool ')
            for name in ("orchestrator.earlier", "orchestrator")
        ]

    def state(self, live: bool = True) -> JsonObject:
        """What the run does now. `live`: whether a process may still hold the folder; without it, the run has ended.

        Raises BadInput for a damaged file.
        """
        settings = self._settings()
        rows = self.steps_file.read()
        done = rows[-1]["step"] + 1 if rows else 0
        total = settings.get("train", {}).get("steps", 0)
        progress = read_progress(self.folder / "logs/progress.json") if live else None
        word, failure = self._word(live, done >= total > 0)
        recent = [row["step_s"] for row in rows[-RECENT:] if "step_s" in row]
        going = word in ("running", "starting")
        left_s = (total - done) * fmean(recent) if recent and going and total > done else None
        run = read_run(self.folder)
        return {
            "name": self.folder.resolve().name,
            "folder": str(self.folder),
            "state": word,
            "going": going,
            "text": progress.text if progress is not None and going else "",
            "share": progress.share if progress is not None and going else (done / total if total else None),
            "done": done,
            "steps": total,
            "left_s": left_s,
            "failure": failure,
            "stages": list(run.stages),
            "resumes": max(0, sum(one.what == "training" for one in run.attempts) - 1),
            "facts": _facts(settings),
            "at": time.time(),
        }

    def _settings(self) -> JsonObject:
        file = self.folder / "config.toml"
        if not file.exists():
            return {}
        try:
            return tomllib.loads(file.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{file}: the run's configuration can't be read: {error}") from None

    def _word(self, live: bool, trained: bool) -> tuple[str, list[str] | None]:
        """The state in a word, and the name and message of the error that ended the run."""
        file = self.folder / "failure.json"
        failure = None
        if file.exists():
            told = read_json(file, "why the run ended", "see the logs")
            failure = [str(told.get("error", "")), str(told.get("message", ""))]
        if live and self._is_held():
            if failure is not None:
                return "ending", failure
            return ("running" if self.steps_file.rows else "starting"), None
        if failure is not None:
            return "stopped" if failure[0] == "Stopped" else "failed", failure
        if trained or not self.steps_file.rows and not (self.folder / "config.toml").exists():
            return "finished", None
        return "died" if live else "ended", None

    def _is_held(self) -> bool:
        beat = self.folder / "logs/progress.json"
        beats = beat.exists() and time.time() - beat.stat().st_mtime < BEAT_S
        return is_held(self.folder / "lock") or (beats and not (self.folder / "failure.json").exists())

    def steps(self, after: int = 0, of: int = 0) -> JsonObject:
        """The figures of the steps, by column: those after the first `after`, if the file is still the one with number
        `of`. A figure that a step lacks, or that is not finite, is null."""
        rows = self.steps_file.read()
        first = after if of == self.steps_file.of and after <= len(rows) else 0
        return {"of": self.steps_file.of, "first": first, "columns": columns_of(rows[first:])}

    def rest(self) -> JsonObject:
        """Evaluations, warnings, the pool's history, and the steps with conversations."""
        rows = [row for row in self._evaluations.read() if "avg_at_k" in row]
        files = (self.folder / "responses").glob("step-*.jsonl")
        numbers = (path.stem.removeprefix("step-") for path in files)
        return {
            "evaluations": [{key: row.get(key) for key in ACCURACY} for row in rows],
            "notices": [dict(row) for row in self._notices.read()[-NOTICES:]],
            "pool": self._history(),
            "sampled": sorted(int(number) for number in numbers if number.isdigit()),
        }

    def _history(self) -> JsonObject:
        """The states of each instance as [state, start, end], in seconds since the epoch."""
        found: dict[str, list[list[Any]]] = {}
        for file in self._pool:
            for span in file.read():
                states = found.setdefault(span["lane"].removeprefix("pool "), [])
                if states and states[-1][0] == span["name"]:
                    states[-1][2] = span["end"]
                else:
                    states.append([span["name"], span["start"], span["end"]])
        return {"colors": COLORS, "instances": {name: states[-CHANGES:] for name, states in sorted(found.items())}}

    def timeline(self, whole: bool) -> JsonObject:
        """The timeline: of the whole run, or of its last `LIVE_STEPS` steps."""
        rows = self.steps_file.read()
        sizes = {row["step"]: row["pool_size"] for row in rows if "pool_size" in row}
        trace = self.folder / "trace"
        if whole:
            return whole_run(trace, sizes)
        return content_of(last_spans(trace, len(rows) - LIVE_STEPS), sizes)

    def samples(self, step: int) -> list[JsonObject]:
        """The conversations of a step, as `RunFolder.add_samples` wrote them; none if they were deleted."""
        return [dict(row) for row in read_lines(self.folder / f"responses/step-{step:06d}.jsonl")]


def _facts(settings: JsonObject) -> JsonObject:
    """What a person wants to know of the configuration."""
    train, rollout, algorithm = (settings.get(table, {}) for table in ("train", "rollout", "algorithm"))
    if not settings:
        return {}
    prompts = counted(train.get("prompts_per_step", 0), "prompt")
    responses = counted(rollout.get("group_size", 0), "response")
    return {
        "model": str(settings.get("model", {}).get("path", "")),
        "data": str(settings.get("data", {}).get("train", "")),
        "mode": str(train.get("mode", "")),
        "a step": f"{prompts} × {responses}",
        "algorithm": f"{algorithm.get('advantage')}, {algorithm.get('loss')}",
    }


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | int | None]]:
    """The figures of steps by column. One that a step lacks, or that is not finite, is None."""
    names = dict.fromkeys(
        name for row in rows for name, value in row.items() if name != "ended_s" and _is_number(value)
    )
    return {name: [_number(row.get(name)) for row in rows] for name in names}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float | int | None:  # noqa: ANN401
    if not _is_number(value) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
