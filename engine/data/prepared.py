"""From the config to the training problems and the held-out problems of a run: read, clean, split, decontaminate.

`prepare` is a pure function of the config and the files. Launcher, evaluation and tasks each call it and get the same
rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import Config
from engine.data.benchmark_files import benchmark_paths
from engine.data.cleaning import clean, with_rows
from engine.data.overlap import Index, Overlap
from engine.data.problems import ProblemRow, Problems, Rejected, content_hash, read_problems, short
from engine.data.prompts import prompt_id
from engine.data.split import split
from engine.errors import BadInput

BENCHMARK = "benchmark"
"""Entry of `data.decontaminate` that stands for the held-out rows and `evaluate.benchmark`."""

IN_BENCHMARK = "in an evaluation set"
"""Reason of a training row that was left out because of an overlap."""


@dataclass(frozen=True)
class Prepared:
    """The problem sets of a run."""

    train: Problems
    """The cleaned training rows, without rows that are held out or evaluated."""
    heldout: Problems
    """The rows held out of training: those of data.heldout, unchanged, or a share of the training file."""
    against: tuple[str, ...]
    """The evaluation sets that `train` was compared with, by their source."""
    overlaps: tuple[Overlap, ...]
    """The training rows that were left out because they overlap, with the rows that they overlap with."""
    notes: tuple[str, ...] = ()
    """Remarks for the user: a set with which `train` was not compared, and why."""


def prepare(config: Config) -> Prepared:
    """All problem sets of a run. Raises BadInput like `read_problems`, and if no training row is left."""
    train, heldout = _sides(config)
    sets, notes = _evaluation_sets(config, train, heldout)
    overlaps = _overlaps(train, [row for problems in sets for row in problems.rows])
    return Prepared(
        train=_without(train, overlaps),
        heldout=heldout,
        against=tuple(problems.source for problems in sets),
        overlaps=overlaps,
        notes=notes,
    )


def training_problems(config: Config) -> Problems:
    """The problems that a run trains on."""
    return prepare(config).train


def heldout_problems(config: Config) -> Problems:
    """The problems that a run is evaluated on if `evaluate.benchmark` is empty."""
    return read_problems(config.data.heldout) if config.data.heldout else _sides(config)[1]


def version(problems: Problems) -> str:
    """SHA-256 (hex) over problem and answer of each row, in order. The same rows in another file have the same
    version."""
    ids = (prompt_id(row.problem, row.answer) for row in problems.rows)
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()


def file_hashes(config: Config) -> dict[str, str]:
    """Content hash of every problem set that `prepare` reads. A cached result depends on them and on the config."""
    return {path: content_hash(path) for path in _paths(config)}


def _sides(config: Config) -> tuple[Problems, Problems]:
    """Training and held-out problems, before decontamination."""
    data = config.data
    train = clean(read_problems(data.train), math=config.reward.function == "math")
    return (train, read_problems(data.heldout)) if data.heldout else split(train, data.heldout_fraction)


def _paths(config: Config) -> list[str]:
    named = [path for path in config.data.decontaminate if path != BENCHMARK]
    return list(
        dict.fromkeys(filter(None, [config.data.train, config.data.heldout, *benchmark_paths(config).values(), *named]))
    )


def _evaluation_sets(config: Config, train: Problems, heldout: Problems) -> tuple[list[Problems], tuple[str, ...]]:
    """The sets to compare with, and notes. The training file itself is left out with a note: no training row would be
    left."""
    wanted = config.data.decontaminate
    evaluated = list(benchmark_paths(config).values())
    paths = [path for name in wanted for path in (evaluated if name == BENCHMARK else [name])]
    sets = ([heldout] if BENCHMARK in wanted else []) + [read_problems(path) for path in dict.fromkeys(paths)]
    same = [problems for problems in sets if problems is not heldout or config.data.heldout]
    same = [problems for problems in same if problems.content_hash == train.content_hash]
    notes = dict.fromkeys(
        f"{problems.source} is the training set itself: training problems are evaluated" for problems in same
    )
    return [problems for problems in sets if not any(problems is other for other in same)], tuple(notes)


def _overlaps(train: Problems, rows: Sequence[ProblemRow]) -> tuple[Overlap, ...]:
    if not rows:
        return ()
    index = Index(rows)
    return tuple(found for row in train.rows if (found := index.find(row)))


def _without(train: Problems, overlaps: Sequence[Overlap]) -> Problems:
    if not overlaps:
        return train
    rejected = [_rejected(overlap) for overlap in overlaps]
    out = {rejection.where for rejection in rejected}
    if len(overlaps) == len(train.rows):
        raise BadInput(
            f"problem set {train.source}: every row is also in an evaluation set (the first: {rejected[0]}); "
            "give other data, or set data.decontaminate = [] to train on these rows anyway"
        )
    rows = [row for row in train.rows if row.where not in out]
    return with_rows(train, rows, [*train.rejected, *rejected])


def _rejected(overlap: Overlap) -> Rejected:
    expected = f"no problem of an evaluation set; {overlap.share:.0%} of it is {overlap.other.where}"
    return Rejected(
        where=overlap.row.where,
        column="problem",
        reason=IN_BENCHMARK,
        found=short(overlap.row.problem),
        expected=expected,
    )
