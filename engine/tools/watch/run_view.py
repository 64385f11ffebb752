"""What the page of a run shows, read from the run folder alone, which it leaves as it is.

Each part is JSON for the page's script (page.js). Files that grow are read from where the last reading ended, so a long
run costs no more than a short one.
"""

from __future__ import annotations

import math
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from engine.errors import BadInput, counted
from engine.run.files import GrowingLines, read_lines
from engine.run.folder import RunFolder
from engine.run.run_file import read_run
from engine.run.run_status import read_status
from engine.run.trace import last_spans
from engine.tools.timeline import COLORS, content_of, whole_run
from engine.types import JsonObject

LIVE_STEPS = 4
"""Number of newest steps on the timeline of a run that goes on."""
COUNTS = re.compile(r"[\d,]+ of [\d,]+ ")
"""What a notice begins with that is told again with its new count (engine.orchestrator.run_events)."""
NOTICES = 300
"""Number of newest warnings."""
EVALUATED = 8
"""Number of problems of an evaluation whose responses are shown."""
WHOSE = ("prompt_id", "problem", "answer")
"""What a line of an evaluation's table says of the problem."""
CHANGES = 200
"""Number of newest states of an instance in the history of the pool."""
ACCURACY = ("benchmark", "weight_version", "avg_at_k", "ci_low", "ci_high", "problems", "samples", "partial_scores")
"""The parts of an evaluation that the page shows."""


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
        total = settings.get("train", {}).get("steps", 0)
        status = read_status(RunFolder(self.folder), rows, total, over=not live)
        progress = status.progress
        run = read_run(self.folder)
        return {
            "name": self.folder.resolve().name,
            "folder": str(self.folder),
            "state": status.word,
            "going": status.goes_on,
            "text": progress.text if progress is not None else "",
            "share": progress.share if progress is not None else (status.done / total if total else None),
            "done": status.done,
            "steps": total if status.word != "evaluated" else 0,
            "left_s": status.left_s,
            "failure": ": ".join(filter(None, (status.error, status.reason))),
            "resume": status.resume,
            "stages": list(run.stages),
            "resumes": len(run.resumes),
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

    def steps(self, after: int = 0, of: int = 0) -> JsonObject:
        """The figures of the steps, by column: those after the first `after`, if the file is still the one with number
        `of`. A figure that a step lacks, or that is not finite, is null."""
        rows = self.steps_file.read()
        first = after if of == self.steps_file.of and after <= len(rows) else 0
        return {"of": self.steps_file.of, "first": first, "columns": columns_of(rows[first:])}

    def rest(self) -> JsonObject:
        """Evaluations, warnings, the pool's history, and the steps with conversations."""
        rows = [row for row in self._evaluations.read() if "avg_at_k" in row]
        return {
            "evaluations": [{key: row.get(key) for key in ACCURACY} for row in rows],
            "notices": newest_notices(self._notices.read())[-NOTICES:],
            "pool": self._history(),
            "sampled": [*self._conversations()],
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

    def _conversations(self) -> dict[str, Path]:
        """The files with conversations, by what the page calls them: evaluations, then steps by their numbers."""
        rows = [row for row in self._evaluations.read() if "table" in row]
        named = {f"{row['benchmark']}, version {row['weight_version']}": self.folder / row["table"] for row in rows}
        steps = {str(step): path for step, path in RunFolder(self.folder).all_samples()}
        return {name: table for name, table in named.items() if table.is_file()} | steps

    def samples(self, name: str) -> list[JsonObject]:
        """The conversations of a step, as `RunFolder.add_samples` wrote them, or the first ones of an evaluation, by a
        name in `rest`; none if they were deleted."""
        file = self._conversations().get(name)
        if file is None or name.isdecimal():
            return [dict(row) for row in read_lines(file)] if file is not None else []
        return [
            {
                **one,
                **{key: row[key] for key in WHOSE},
                "response": one["text"],
                "detail": one["answer"],
                "tokens": None,
            }
            for row in islice(read_lines(file), EVALUATED)
            for one in row.get("responses", ())
        ]


def newest_notices(rows: Sequence[JsonObject]) -> list[JsonObject]:
    """The notices of a run without those that a later one replaces: of each count, only the newest line."""
    newest: dict[object, JsonObject] = {}
    for place, row in enumerate(rows):
        counts = COUNTS.match(row["text"])
        kind = (row["stage"], row["text"][counts.end() :].partition(":")[0]) if counts else place
        newest.pop(kind, None)
        newest[kind] = dict(row)
    return list(newest.values())


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
        "algorithm": f"advantage {algorithm.get('advantage')}, loss {algorithm.get('loss')}",
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
