"""Compares the accuracy of two runs on a benchmark: paired by problem if both have a table, else from their
intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engine.evaluation import paired
from engine.evaluation.tables import kind_of_average, protocol_differences
from engine.tools.comparison.run_figures import ComparedRun, Interval, Row


@dataclass(frozen=True)
class Difference:
    """The difference between the avg@k of two runs, each after its last evaluated update."""

    benchmark: str
    interval: Interval
    paired: bool
    problems: int
    p_value: float | None = None
    """Two-sided p-value of the paired sign-flip test."""
    better: int = 0
    """Number of problems on which the first run is better."""
    worse: int = 0
    notes: tuple[str, ...] = ()
    """Reasons why the comparison is limited: different weight versions or protocols."""
    level: float = 0.95
    """Confidence of the interval."""

    @property
    def agreed(self) -> bool:
        """Whether the sign-flip test, too, finds a difference at the interval's level. True if there is no test.

        The interval alone is too narrow if few problems differ: it can exclude 0 when the first run is better on
        five problems and worse on none, but the test gives p = 0.06.
        """
        return self.p_value is None or self.p_value <= 1 - self.level


def last_evaluation(run: ComparedRun, benchmark: str) -> Row | None:
    """The run's last evaluation on a benchmark with trained weights (version above 0), or with any if it has no steps
    (`metronome evaluate`); None if there is none."""
    rows = [
        row
        for row in run.evaluations
        if row["benchmark"] == benchmark and (not run.steps or row.get("weight_version", row["step"]) > 0)
    ]
    return max(reversed(rows), key=lambda row: row["step"]) if rows else None  # the newest of several at one step


def benchmark_names(runs: list[ComparedRun]) -> list[str]:
    """The benchmarks of all runs, in order of appearance."""
    return list(dict.fromkeys(row["benchmark"] for run in runs for row in run.evaluations))


def kind_of(runs: Sequence[ComparedRun], benchmark: str) -> str:
    """The name of the runs' avg@k on a benchmark: accuracy, or reward if any response of a run is neither right nor
    wrong."""
    rows = [row for run in runs if (row := last_evaluation(run, benchmark)) is not None]
    return kind_of_average(any(row.get("partial_scores") for row in rows))


def accuracy_difference(one: ComparedRun, other: ComparedRun, benchmark: str, confidence: float) -> Difference | None:
    """The difference on a benchmark. None unless both runs have a `last_evaluation` on it."""
    mine = last_evaluation(one, benchmark)
    theirs = last_evaluation(other, benchmark)
    if mine is None or theirs is None:
        return None
    notes = _notes(mine, theirs)
    ours, their = (run.tables.get(row.get("table", "")) for run, row in ((one, mine), (other, theirs)))
    if ours and their and ours.keys() == their.keys() and mine.get("samples") == theirs.get("samples"):
        found = paired.compare_paired(ours, their, int(mine.get("samples", 1)), confidence)
        interval = Interval(found.difference, found.ci_low, found.ci_high)
        signs = found.p_value, found.better, found.worse
        return Difference(benchmark, interval, True, found.problems, *signs, notes, confidence)
    problems = int(min(mine.get("problems", 0), theirs.get("problems", 0)))
    interval = unpaired_interval(mine, theirs, confidence)
    return Difference(benchmark, interval, False, problems, notes=notes, level=confidence)


def unpaired_interval(mine: Row, theirs: Row, confidence: float) -> Interval:
    """Difference of two avg@k from their own 95 % intervals (Newcombe 1998, method 10, scaled to the confidence)."""
    gap = mine["avg_at_k"] - theirs["avg_at_k"]
    if any(key not in row for row in (mine, theirs) for key in ("ci_low", "ci_high")):
        return Interval(gap, -math.inf, math.inf)
    scale = statistics.NormalDist().inv_cdf(0.5 + confidence / 2) / statistics.NormalDist().inv_cdf(0.975)
    down = math.hypot(mine["avg_at_k"] - mine["ci_low"], theirs["ci_high"] - theirs["avg_at_k"])
    up = math.hypot(mine["ci_high"] - mine["avg_at_k"], theirs["avg_at_k"] - theirs["ci_low"])
    return Interval(gap, gap - scale * down, gap + scale * up)


def _notes(mine: Row, theirs: Row) -> tuple[str, ...]:
    found = []
    if mine["step"] != theirs["step"]:
        found.append(f"after {mine['step']} and {theirs['step']} updates")
    if "protocol" in mine and "protocol" in theirs:
        if unlike := protocol_differences(mine["protocol"], theirs["protocol"]):
            found.append("evaluated differently: " + ", ".join(unlike))
    elif mine.get("problems") != theirs.get("problems") or mine.get("samples") != theirs.get("samples"):
        found.append("evaluated on different numbers of problems or samples")
    return tuple(found)
