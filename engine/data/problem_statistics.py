"""The report on a run's problem sets: their rows and lengths, what was left out and why, and their overlaps."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TypedDict

from engine.config import Config
from engine.data.prepared import Prepared, prepare_problems, problems_version, read_prepared, write_prepared
from engine.data.problems import Problems, format_counts
from engine.errors import BadInput, counted
from engine.run.files import read_json, write_json
from engine.run.logs import log_error

REPORT = "data.json"
"""Name of the file in the run folder that holds the report of `report_data`."""

LISTED = 1000
"""Number of rejected rows that a report lists one by one; all are counted."""


class SetFigures(TypedDict):
    """Figures of one problem set."""

    source: str
    content_hash: str
    version: str
    rows: int
    skipped: dict[str, int]
    problem_characters: dict[str, float]
    """Lengths of the problems: min, median and max."""
    rejected: list[str]


class OverlapRow(TypedDict):
    """A training problem that also occurs in another set."""

    row: str
    problem: str
    overlaps_with: str
    that_problem: str
    share: float


class DataReport(TypedDict):
    """Figures of all sets of a run: data.json in the run folder."""

    train: SetFigures
    heldout: SetFigures
    compared_with: list[str]
    overlaps: list[OverlapRow]
    notes: list[str]


def report_data(prepared: Prepared) -> DataReport:
    """The report on a run's problem sets, as JSON: data.json in the run folder."""
    return {
        "train": _figures(prepared.train),
        "heldout": _figures(prepared.heldout),
        "compared_with": list(prepared.against),
        "overlaps": [
            {
                "row": found.row.where,
                "problem": found.row.problem[:200],
                "overlaps_with": found.other.where,
                "that_problem": found.other.problem[:200],
                "share": round(found.share, 3),
            }
            for found in prepared.overlaps[:LISTED]
        ],
        "notes": list(prepared.notes),
    }


def record_data(config: Config, prepared: Prepared) -> DataReport:
    """Write what a run needs of its problem sets to its folder: the rows for its later stages, and the report, which is
    returned."""
    config.folder.mkdir(parents=True, exist_ok=True)
    write_prepared(config, prepared)
    found = report_data(prepared)
    write_json(config.folder / REPORT, found)
    return found


def recorded_problems(config: Config) -> Problems:
    """The problems that a run trains on, from its folder. If files or settings changed since they were written, they
    are prepared anew and the folder then describes these. Raises BadInput as `prepare_problems` and `read_prepared` do.
    """
    found = read_prepared(config)
    if found is not None:
        return found[0]
    prepared = prepare_problems(config)
    record_data(config, prepared)
    return prepared.train


def read_report(folder: Path) -> DataReport | None:
    """The report in a run folder; None if there is none. A damaged one is none, with a warning, because no training
    depends on it."""
    try:
        file = folder / REPORT
        repair = "delete it, MLflow then lacks its figures"
        return read_json(file, "the report on the data", repair, kind=DataReport) if file.exists() else None
    except BadInput as error:
        log_error(f"warning: {error}")
        return None


def describe_report(found: DataReport) -> str:
    """A report in one line for the console."""
    train = found["train"]
    heldout = found["heldout"]
    skips = f"; skipped {format_counts(train['skipped'])}" if train["skipped"] else ""
    notes = "".join(f"; {note}" for note in found["notes"])
    lengths = train["problem_characters"]
    return (
        f"{counted(train['rows'], 'problem')} of {lengths['median']:.0f} characters "
        f"({lengths['min']:.0f}-{lengths['max']:.0f}), "
        f"{heldout['rows']} held out{skips}{notes}"
    )


def _figures(problems: Problems) -> SetFigures:
    lengths = [len(row.problem) for row in problems.rows]
    return {
        "source": problems.source,
        "content_hash": problems.content_hash,
        "version": problems_version(problems),
        "rows": len(problems.rows),
        "skipped": dict(problems.skipped),
        "problem_characters": {"min": min(lengths), "median": median(lengths), "max": max(lengths)},
        "rejected": [str(row) for row in problems.rejected[:LISTED]],
    }
