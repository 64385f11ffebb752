"""Statistics of a problem set: lengths, difficulty, kinds of answers, what was left out and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any, TypedDict

from engine.config import Config
from engine.data.prepared import Prepared, prepare_problems, problems_version, read_prepared, write_prepared
from engine.data.problems import ProblemRow, Problems, format_counts
from engine.errors import BadInput, counted
from engine.run.files import read_json, write_json
from engine.run.logs import log_error

DIFFICULTY = ("difficulty", "level")
"""Names of the column with the difficulty of a problem. The first that a row has is used."""

REPORT = "data.json"
"""Name of the file in the run folder that holds the report of `report_data`."""

LISTED = 1000
"""Number of rejected rows that a report lists one by one; all are counted."""

_KINDS = (
    ("whole number", re.compile(r"[+-]?[\d,\\! ]*\d")),
    ("decimal", re.compile(r"[+-]?\d*\.\d+")),
    ("fraction", re.compile(r"[+-]?(?:\\[dt]?frac\s*\{?-?\d+\}?\s*\{?\d+\}?|\d+/\d+)")),
    ("words", re.compile(r"\\(?:text|mbox)\s*\{[^{}]*\}|[A-Za-z ]+")),
)


class SetFigures(TypedDict):
    """Statistics of one problem set; lengths are in characters."""

    source: str
    content_hash: str
    version: str
    rows: int
    skipped: dict[str, int]
    problem_characters: dict[str, float]
    answer_characters: dict[str, float]
    answers: dict[str, int]
    difficulty: dict[str, int]
    rejected: list[str]


class OverlapRow(TypedDict):
    """A training problem that also occurs in another set."""

    row: str
    problem: str
    overlaps_with: str
    that_problem: str
    share: float


class DataReport(TypedDict):
    """Statistics of all sets of a run: data.json in the run folder."""

    train: SetFigures
    heldout: SetFigures
    compared_with: list[str]
    overlaps: list[OverlapRow]
    notes: list[str]


def report_data(prepared: Prepared) -> DataReport:
    """The statistics of a run's problem sets, as JSON: data.json in the run folder."""
    return {
        "train": describe_set(prepared.train),
        "heldout": describe_set(prepared.heldout),
        "compared_with": list(prepared.against),
        "overlaps": [_overlap(found.row, found.other, found.share) for found in prepared.overlaps[:LISTED]],
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


def describe_set(problems: Problems) -> SetFigures:
    """Statistics of one set; lengths are in characters."""
    return {
        "source": problems.source,
        "content_hash": problems.content_hash,
        "version": problems_version(problems),
        "rows": len(problems.rows),
        "skipped": dict(problems.skipped),
        "problem_characters": spread_figures([len(row.problem) for row in problems.rows]),
        "answer_characters": spread_figures([len(row.answer) for row in problems.rows]),
        "answers": dict(Counter(answer_kind(row.answer) for row in problems.rows).most_common()),
        "difficulty": count_difficulties(problems.rows),
        "rejected": [str(row) for row in problems.rejected[:LISTED]],
    }


def spread_figures(values: Sequence[int]) -> dict[str, float]:
    """Smallest, quartiles, the 95th percentile, largest."""
    if len(values) < 2:
        return {name: float(values[0]) for name in ("min", "q1", "median", "q3", "p95", "max")}
    cuts = quantiles(values, n=20, method="inclusive")
    return {"min": min(values), "q1": cuts[4], "median": cuts[9], "q3": cuts[14], "p95": cuts[18], "max": max(values)}


def count_difficulties(rows: Sequence[ProblemRow]) -> dict[str, int]:
    """Difficulty (numbers are rounded) → number of rows. Rows without a difficulty are left out."""
    values = [value for row in rows if (value := row_difficulty(row.columns)) is not None]
    return {name: count for name, count in sorted(Counter(values).items(), key=_natural)}


def row_difficulty(columns: Mapping[str, Any]) -> str | None:
    """The difficulty of a row as text; None if it has none."""
    value = next((columns[name] for name in DIFFICULTY if columns.get(name) is not None), None)
    if isinstance(value, int | float) and value == value:
        return str(round(value))
    return value if isinstance(value, str) and value.strip() else None


def answer_kind(answer: str) -> str:
    """The approximate kind of an answer, such as "fraction" or "words"."""
    bare = answer.strip()
    return next((name for name, pattern in _KINDS if pattern.fullmatch(bare)), "formula")


def _natural(item: tuple[str, int]) -> tuple[int, str]:
    name = item[0]
    return (int(name) if name.lstrip("-").isdigit() else 10**6, name)


def _overlap(row: ProblemRow, other: ProblemRow, share: float) -> OverlapRow:
    return {
        "row": row.where,
        "problem": row.problem[:200],
        "overlaps_with": other.where,
        "that_problem": other.problem[:200],
        "share": round(share, 3),
    }
