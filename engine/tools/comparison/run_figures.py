"""What a run's steps and evaluations say, and how sure a difference of two runs is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.evaluation.intervals import t_interval

Row = Mapping[str, Any]

WARM_UP = 1
"""First steps that don't count for speed: caches and allocators settle."""
MIN_STEPS = 5
"""Fewer common steps give no interval."""
BLOCKS = 6
"""Of neighbouring steps. Few and long ones: a machine's load changes slowly,
and short blocks would be as alike as the steps."""
PARTS = ("sync_s", "check_s", "wait_s", "train_s", "update_s")
"""What the trainer does one after the other in a step; scoring is part of train_s, rollouts go on beside it."""


@dataclass(frozen=True)
class ComparedRun:
    """One run as it was read from its folder or from MLflow."""

    name: str
    source: str
    """Where it was read: a folder, or an MLflow run id and store."""
    config: Mapping[str, str]
    """Flat: "train.mode" → "sync". Values as text."""
    steps: Sequence[Row]
    """Lines of steps.jsonl by step, each step once (of a redone one the last)."""
    evaluations: Sequence[Row] = ()
    """Lines of evaluations.jsonl, in their order."""
    tables: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """An evaluation's `table` → prompt id → mean score."""
    failure: str = ""
    """What ended the run, if it failed: one line."""

    @property
    def mode(self) -> str:
        """train.mode, or "?"."""
        return self.config.get("train.mode", "?")

    @property
    def planned(self) -> int:
        """train.steps; 0 if it is not known."""
        return int(self.config.get("train.steps", "0"))

    @property
    def trained(self) -> int:
        """Steps up to the last one that it has."""
        return int(self.steps[-1]["step"]) + 1 if self.steps else 0

    @property
    def complete(self) -> bool:
        """Whether it did not fail and has the last of its steps."""
        return not self.failure and self.trained >= self.planned


@dataclass(frozen=True)
class Interval:
    """A figure with its confidence interval; infinite bounds where there is too little to say."""

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether there is an interval at all."""
        return math.isfinite(self.low) and math.isfinite(self.high)


def once(rows: Sequence[Row]) -> list[Row]:
    """Rows by step, each step once: of several lines of a step (a redone one) the last."""
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]


def series(run: ComparedRun, key: str) -> list[tuple[int, float]]:
    """(step, figure) of the steps that have the key as a finite number."""
    return [(row["step"], float(row[key])) for row in run.steps if _number(row.get(key))]


def elapsed(run: ComparedRun) -> dict[int, float]:
    """Seconds of training at the end of each step: the sum of step_s so far, from the run's first step on.

    Start-up, evaluations outside steps, pauses and steps that were redone are not in it.
    """
    total = 0.0
    found = {}
    for row in run.steps:
        total += float(row["step_s"]) if _number(row.get("step_s")) else 0.0
        found[row["step"]] = total
    return found


def speed(rows: Sequence[Row]) -> float:
    """Trained tokens per second and device over all the rows: by time, not the mean of the steps' speeds.
    nan without any."""
    known = [row for row in rows if _number(row.get("step_s")) and _number(row.get("tokens_per_s_per_device"))]
    seconds = sum(row["step_s"] for row in known)
    return sum(row["tokens_per_s_per_device"] * row["step_s"] for row in known) / seconds if seconds else math.nan


def counted(run: ComparedRun) -> list[Row]:
    """The steps after the warm-up; all if there are no more."""
    return list(run.steps[WARM_UP:] or run.steps)


def breakdown(run: ComparedRun) -> dict[str, float]:
    """Mean seconds of a step by what the trainer does (`PARTS`, other), beside `rollout_s`, `score_s` and `step_s`."""
    rows = counted(run)
    keys = (*PARTS, "rollout_s", "score_s", "step_s")
    means = {key: _mean([row[key] for row in rows if _number(row.get(key))]) for key in keys}
    parts = sum(means[key] for key in PARTS if not math.isnan(means[key]))
    return {**means, "other_s": max(0.0, means["step_s"] - parts)}


def common(one: ComparedRun, other: ComparedRun, key: str, skip: int = 0) -> list[tuple[Row, Row]]:
    """Rows of the steps that both runs have with the key, in order, without the first `skip` of them."""
    theirs = {row["step"]: row for row in other.steps if _number(row.get(key))}
    return [(row, theirs[row["step"]]) for row in one.steps if row["step"] in theirs and _number(row.get(key))][skip:]


def speed_ratio(one: ComparedRun, other: ComparedRun, confidence: float) -> Interval:
    """Tokens/s/device of `one` over `other`'s, on their common steps.

    Steps that follow each other are alike, so the units are `BLOCKS` blocks of them (method of batch means): Student's
    t interval of the mean log ratio of the blocks. Load that stays for about as long as a block makes it too narrow.
    """
    pairs = [
        pair
        for pair in common(one, other, "tokens_per_s_per_device", WARM_UP)
        if all(row.get("step_s") for row in pair)
    ]
    if not pairs:
        return Interval(math.nan, -math.inf, math.inf)
    logs = [
        _log_ratio(speed([pair[0] for pair in block]), speed([pair[1] for pair in block])) for block in blocks(pairs)
    ]
    mean = _interval(logs, len(pairs), confidence)
    return Interval(*(math.exp(value) if value < 700 else math.inf for value in (mean.value, mean.low, mean.high)))


def reward_difference(one: ComparedRun, other: ComparedRun, confidence: float) -> Interval:
    """Mean reward_mean of `one` minus `other`'s over the last third of their common steps;
    blocks as in `speed_ratio`."""
    pairs = common(one, other, "reward_mean")
    pairs = pairs[-max(MIN_STEPS, math.ceil(len(pairs) / 3)) :]
    if not pairs:
        return Interval(math.nan, -math.inf, math.inf)
    means = [_mean([mine["reward_mean"] - theirs["reward_mean"] for mine, theirs in block]) for block in blocks(pairs)]
    return _interval(means, len(pairs), confidence)


def blocks(rows: Sequence[Any]) -> list[Sequence[Any]]:
    """At most `BLOCKS` blocks of neighbours, as equally long as can be."""
    count = min(BLOCKS, len(rows))
    return [rows[number * len(rows) // count : (number + 1) * len(rows) // count] for number in range(count)]


def _interval(values: Sequence[float], steps: int, confidence: float) -> Interval:
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return Interval(math.nan, -math.inf, math.inf)
    low, high = t_interval(values, confidence) if steps >= MIN_STEPS else (-math.inf, math.inf)
    return Interval(statistics.fmean(values), low, high)


def _log_ratio(one: float, other: float) -> float:
    return math.log(one / other) if one > 0 and other > 0 else math.nan


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
