"""Evaluations in MLflow and as text. Each row of evaluations.jsonl is logged once, with its table as an artifact."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.evaluation.tables import EvaluationRow, rows_of
from engine.launcher.in_run_evaluation import dropped
from engine.run.files import append_line, read_lines
from engine.run.folder import RunFolder
from tasks.console import complain, say
from tasks.tracking import evaluation_texts, retry, tracked_run
from tasks.tracking.mlflow_run import write_queue
from tasks.tracking.retry import TrackingAway

ARTIFACTS = "evaluations"
"""Folder among the MLflow run's artifacts with a table per evaluation."""
POLL_S = 0.5
"""Seconds between two checks whether MLflow has everything."""

_queued: set[str] = set()
"""Tables that this process has put into the write queue."""


def log_new(folder: RunFolder) -> list[EvaluationRow]:
    """Log the rows of evaluations.jsonl that the tracked MLflow run does not have yet; returns them.

    A note in the run folder says which rows were written, so that a crash does not lead to rows that are logged twice.
    """
    new = [row for row in missing(folder) if str(folder.path / row["table"]) not in _queued]
    for row in new:
        _queued.add(str(folder.path / row["table"]))
        _log(row, folder, _notes(folder))
    return new


def missing(folder: RunFolder) -> list[EvaluationRow]:
    """The rows of evaluations.jsonl that are missing in MLflow, according to the notes in the run folder."""
    known = {note["table"] for note in read_lines(_notes(folder))}
    return [row for row in rows_of(folder) if row.get("table", None) not in {None, *known}]


def log_finished(config: Config, tracked: Callable[..., AbstractContextManager[str]] = tracked_run.tracked) -> None:
    """Log a finished evaluation in the run folder's MLflow run.

    Waits for MLflow's artifact store for the same time as for MLflow itself (tasks.tracking.retry). With a shorter wait
    a flow run would be resumed so often that it is ended (tasks.cluster.watchdog). Raises TrackingAway if either does
    not answer for longer. Nothing is lost then: the next log in this run folder writes the rows.
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
    """`log_finished` for a command. The evaluation is done by then, so an MLflow that does not answer is a warning."""
    try:
        log_finished(config)
    except TrackingAway as error:
        complain(
            f"warning: {error}. The figures are in {RunFolder(config.folder).evaluations}; the next evaluation or "
            "resume of this run logs them"
        )


def _notes(folder: RunFolder) -> Path:
    return folder.path / "evaluations" / "logged.jsonl"


def _log(row: Mapping[str, Any], folder: RunFolder, notes: Path) -> None:
    """Log the table, then the figures, then write the note. The write queue keeps this order.

    The figures come after the table: a table can be written again, but repeated figures would be in MLflow twice.
    """
    write_queue().artifact(folder.path / row["table"], ARTIFACTS)
    tracked_run.log_evaluation({key: value for key, value in row.items() if key not in ("protocol", "skipped")})
    write_queue().do(f"note of {row['table']}", lambda: append_line(notes, {"table": row["table"]}))


class InRun:
    """Prints and logs the evaluations inside a run that are new since the last call. Call it after each step."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._told = len(list(read_lines(dropped(folder))))

    def __call__(self) -> None:
        """Read the run folder; print and log what is new."""
        for row in log_new(self._folder):
            if row.get("in_run"):
                say(
                    "evaluate",
                    f"version {row['weight_version']}: {evaluation_texts.describe(row)}; took {row['seconds']:.1f} s, "
                    f"of which training waited {row['exposed_s']:.1f} s",
                )
        lost = list(read_lines(dropped(self._folder)))
        for row in lost[self._told :]:
            say(
                "evaluate",
                f"version {row['weight_version']} dropped: {row['reason']}; training waited {row['exposed_s']:.1f} s",
            )
        self._told = len(lost)
