"""Evaluations in MLflow and in words: each row of evaluations.jsonl once, its table as an artifact."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.evaluation.tables import EvaluationRow, rows_of
from engine.launcher.drain_evaluation import dropped
from engine.run.files import append_line, read_lines
from engine.run.folder import RunFolder
from tasks.console import complain, say
from tasks.tracking import retry, tracked_run
from tasks.tracking.mlflow_run import write_queue
from tasks.tracking.retry import TrackingAway

ARTIFACTS = "evaluations"
"""Folder of the MLflow run's artifacts with a table per evaluation."""
POLL_S = 0.5
"""Between looks whether MLflow has got everything."""

_queued: set[str] = set()
"""Tables that this process has handed to the write queue."""


def log_new(folder: RunFolder) -> list[EvaluationRow]:
    """Log the rows of evaluations.jsonl that the tracked MLflow run does not have yet; returns them.

    What has been written is noted in the run folder, so that a step that is redone after a crash is not logged twice.
    """
    new = [row for row in missing(folder) if str(folder.path / row["table"]) not in _queued]
    for row in new:
        _queued.add(str(folder.path / row["table"]))
        _log(row, folder, _notes(folder))
    return new


def missing(folder: RunFolder) -> list[EvaluationRow]:
    """The rows of evaluations.jsonl that MLflow has not got, as far as the run folder knows."""
    known = {note["table"] for note in read_lines(_notes(folder))}
    return [row for row in rows_of(folder) if row.get("table", None) not in {None, *known}]


def log_finished(config: Config, tracked: Callable[..., AbstractContextManager[str]] = tracked_run.tracked) -> None:
    """Log what a finished evaluation has written, in the run folder's MLflow run.

    Waits for MLflow's store of artifacts as long as for MLflow itself (tasks.tracking.retry): an attempt that gave up
    sooner would be resumed so often that it is ended (tasks.cluster.watchdog). Raises TrackingAway when either is away
    for longer: nothing is lost, the next one to log in this run folder writes it.
    """
    folder = RunFolder(config.folder)
    with tracked(config, evaluation=True):
        log_new(folder)
        deadline = time.monotonic() + retry.AWAY_S
        while missing(folder) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    if missing(folder):
        raise TrackingAway(f"MLflow did not take all evaluations of run {config.run.name} within {retry.AWAY_S:.0f} s")


def log_or_say(config: Config) -> None:
    """The same for a command, whose work is done: an MLflow that is away is a warning."""
    try:
        log_finished(config)
    except TrackingAway as error:
        complain(
            f"warning: {error}. The figures are in {RunFolder(config.folder).evaluations}, the next evaluation or "
            "resume of this run logs them"
        )


def _notes(folder: RunFolder) -> Path:
    return folder.path / "evaluations" / "logged.jsonl"


def _log(row: Mapping[str, Any], folder: RunFolder, notes: Path) -> None:
    """Table, figures and, once both are written, the note of it: the write queue keeps their order.

    The figures come second: a table may be written again, figures would stand there twice.
    """
    write_queue().artifact(folder.path / row["table"], ARTIFACTS)
    tracked_run.log_evaluation({key: value for key, value in row.items() if key not in ("protocol", "skipped")})
    write_queue().do(f"note of {row['table']}", lambda: append_line(notes, {"table": row["table"]}))


class InRun:
    """Says and logs what was evaluated inside a run since the last call; called after each step."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._told = len(list(read_lines(dropped(folder))))

    def __call__(self) -> None:
        """Look into the run folder."""
        for row in log_new(self._folder):
            if row.get("in_run"):
                say(
                    "evaluate",
                    f"version {row['weight_version']}: {describe(row)}; took {row['seconds']:.1f} s, "
                    f"of which training waited {row['exposed_s']:.1f} s",
                )
        lost = list(read_lines(dropped(self._folder)))
        for row in lost[self._told :]:
            say(
                "evaluate",
                f"version {row['weight_version']} dropped: {row['reason']}; training waited {row['exposed_s']:.1f} s",
            )
        self._told = len(lost)


def describe(row: Mapping[str, Any]) -> str:
    """One evaluation for people: avg@k, pass@k and maj@k with their 95 % intervals, and what limited it."""
    k = row["samples"]
    figures = [f"avg@{k} {_with_interval(row, 'avg_at_k', '')}"]
    if "pass_ci_low" in row and k > 1:
        figures += [f"pass@{k} {_with_interval(row, 'pass_at_k', 'pass_')}"]
        figures += [f"maj@{k} {_with_interval(row, 'maj_at_k', 'maj_')}"] if "maj_at_k" in row else []
    return f"{', '.join(figures)} on {row['problems']} problems of {row['benchmark']}{_cut(row)}"


def _cut(row: Mapping[str, Any]) -> str:
    """What a length limit ended, which may be why the figures are low; empty if it was nothing."""
    if not row.get("truncated"):
        return ""
    by_context = f", {row['context_cut']} of them by the context" if row["context_cut"] else ""
    return f"; {row['truncated']} of {row['problems'] * row['samples']} responses cut at the length limit{by_context}"


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Evaluations for people, with the paired comparison where there is one; a line each."""
    lines = [
        describe(row)
        + (
            f"; against version {row['against']['weight_version']}: {difference(row['against'])}"
            if "against" in row
            else ""
        )
        for row in rows
    ]
    return "\n             ".join(lines)


def _with_interval(row: Mapping[str, Any], name: str, prefix: str) -> str:
    return f"{row[name]:.3f} [{row[prefix + 'ci_low']:.3f}, {row[prefix + 'ci_high']:.3f}]"


def difference(found: Mapping[str, Any]) -> str:
    """A paired comparison for people."""
    return (
        f"{found['difference']:+.3f} [{found['ci_low']:+.3f}, {found['ci_high']:+.3f}], p = {found['p_value']:.2g}; "
        f"better on {found['better']}, worse on {found['worse']} of {found['problems']} problems"
    )


def closing(folder: RunFolder) -> dict[str, str]:
    """Rows of the closing table: each benchmark's first and last evaluation, their paired difference,
    and the cost in the run."""
    rows = rows_of(folder)
    names = list(dict.fromkeys(row["benchmark"] for row in rows))
    table: dict[str, str] = {}
    for name in names:
        own = [row for row in rows if row["benchmark"] == name]
        table |= _before_and_after(own, f" ({name})" if len(names) > 1 else "")
    return table | _cost(rows, list(read_lines(dropped(folder))))


def _before_and_after(rows: Sequence[Mapping[str, Any]], which: str) -> dict[str, str]:
    first = rows[0]
    last = rows[-1]
    table = {
        f"accuracy {when}{which}": f"{describe(row)} (version {row['weight_version']})"
        for when, row in (("before", first), ("after", last))
    }
    if "against" in last:
        table[f"difference{which}"] = difference(last["against"])
    return table


def _cost(rows: Iterable[Mapping[str, Any]], lost: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What evaluation inside the run cost; nothing where there was none."""
    rounds = {row["weight_version"]: row for row in rows if row.get("in_run")}
    if not rounds and not lost:
        return {}
    waited = sum(row["exposed_s"] for row in (*rounds.values(), *lost))
    gone = f", {len(lost)} dropped ({lost[-1]['reason']})" if lost else ""
    return {"evaluated in the run": f"{len(rounds)} times{gone}; training waited {waited:.1f} s for it"}
