"""Figures of a run's steps and evaluations, and confidence intervals for differences of two runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.algorithm.alignment import LOW, RECENT, upper_end
from engine.evaluation.intervals import t_interval

Row = Mapping[str, Any]

REWARD = "reward/"
"""How the names of figures of a reward's functions and metrics begin."""
WARM_UP = 1
"""Number of first steps that are not counted for speed, because caches and allocators are cold."""
MIN_STEPS = 5
"""With fewer common steps, there is no interval."""
BLOCKS = 6
"""Number of blocks of neighbouring steps. They are few and long, because the load of a machine changes slowly, and
short blocks would be correlated like the steps."""
PARTS = ("sync_s", "check_s", "wait_s", "train_s", "update_s")
"""Times of the parts of a trainer's step, which follow one another. Scoring is part of train_s; rollouts run at the
same time."""

SETTLED = 50
"""First step whose cosine counts, if later ones are as many (GAC, Table 3: "after step 50")."""
SMOOTH = 5
"""Number of steps over which a point of the reward's curve is the mean."""
FALL = 0.2
"""Share of the best reward whose loss is a fall, and least fall of a reward that counts, a quarter of this."""
UNEQUAL = 1.5
"""From this ratio of times for equal work on, two runs count as runs under another load."""
ALONE = ("sync", "periodic")
"""Modes in which no instance samples during an update, so that its time does not depend on the mode."""


@dataclass(frozen=True)
class ComparedRun:
    """A run, read from its folder or from MLflow."""

    name: str
    source: str
    """Where the run was read from: a folder, or an MLflow run id and store."""
    config: Mapping[str, str]
    """The flat config, such as "train.mode" → "sync", with values as text."""
    steps: Sequence[Row]
    """Lines of steps.jsonl by step. Each step occurs once; for a repeated step, the last line."""
    evaluations: Sequence[Row] = ()
    """Lines of evaluations.jsonl, in order."""
    tables: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The `table` of an evaluation → prompt id → mean score."""
    failure: str = ""
    """If the run failed, the reason in one line."""

    @property
    def mode(self) -> str:
        """train.mode, or "?"."""
        return self.config.get("train.mode", "?")

    @property
    def planned(self) -> int:
        """train.steps; 0 if unknown."""
        return int(self.config.get("train.steps", "0"))

    @property
    def trained(self) -> int:
        """The number of steps up to the run's last one."""
        return int(self.steps[-1]["step"]) + 1 if self.steps else 0

    @property
    def complete(self) -> bool:
        """Whether the run did not fail and has its last step."""
        return not self.failure and self.trained >= self.planned


@dataclass(frozen=True)
class Interval:
    """A figure with its confidence interval. The bounds are infinite if there is too little data."""

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether there is an interval at all."""
        return math.isfinite(self.low) and math.isfinite(self.high)


def steps_once(rows: Sequence[Row]) -> list[Row]:
    """Rows by step, each step once. If a step has several lines because it was repeated, the last counts."""
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]


def figure_series(run: ComparedRun, key: str) -> list[tuple[int, float]]:
    """(step, figure) of each step that has a finite number for the key."""
    return [(row["step"], float(row[key])) for row in run.steps if _number(row.get(key))]


def elapsed_seconds(run: ComparedRun) -> dict[int, float]:
    """Seconds of training at the end of each step: the running sum of step_s from the run's first step.

    Start-up, evaluations outside steps, pauses and repeated steps are not included.
    """
    total = 0.0
    found = {}
    for row in run.steps:
        total += float(row["step_s"]) if _number(row.get("step_s")) else 0.0
        found[row["step"]] = total
    return found


def mean_speed(rows: Sequence[Row]) -> float:
    """Trained tokens per second and device over all rows, weighted by time (not the mean of the steps' speeds). nan for
    no rows."""
    known = [row for row in rows if _number(row.get("step_s")) and _number(row.get("tokens_per_s_per_device"))]
    seconds = sum(row["step_s"] for row in known)
    return sum(row["tokens_per_s_per_device"] * row["step_s"] for row in known) / seconds if seconds else math.nan


def counted_steps(run: ComparedRun) -> list[Row]:
    """The steps after the warm-up; all steps if none follow it."""
    return list(run.steps[WARM_UP:] or run.steps)


def step_breakdown(run: ComparedRun) -> dict[str, float]:
    """Mean seconds of the parts of a step (`PARTS` and other_s), and of `rollout_s`, `score_s` and `step_s`."""
    rows = counted_steps(run)
    keys = (*PARTS, "rollout_s", "score_s", "step_s")
    means = {key: _mean([row[key] for row in rows if _number(row.get(key))]) for key in keys}
    parts = sum(means[key] for key in PARTS if not math.isnan(means[key]))
    return {**means, "other_s": max(0.0, means["step_s"] - parts)}


def common_steps(one: ComparedRun, other: ComparedRun, key: str, skip: int = 0) -> list[tuple[Row, Row]]:
    """Pairs of rows of the steps that both runs have with the key, in order, without the first `skip` steps."""
    theirs = {row["step"]: row for row in other.steps if _number(row.get(key))}
    return [(row, theirs[row["step"]]) for row in one.steps if row["step"] in theirs and _number(row.get(key))][skip:]


def speed_ratio(one: ComparedRun, other: ComparedRun, confidence: float) -> Interval:
    """The ratio of tokens/s/device of `one` to `other`, on their common steps.

    Consecutive steps are correlated, so the units are `BLOCKS` blocks of steps (method of batch means). The interval is
    Student's t interval of the mean log ratio of the blocks. It is too narrow if load lasts about as long as a block.
    """
    pairs = [
        pair
        for pair in common_steps(one, other, "tokens_per_s_per_device", WARM_UP)
        if all(row.get("step_s") for row in pair)
    ]
    if not pairs:
        return Interval(math.nan, -math.inf, math.inf)
    logs = [
        _log_ratio(mean_speed([pair[0] for pair in block]), mean_speed([pair[1] for pair in block]))
        for block in split_blocks(pairs)
    ]
    mean = _interval(logs, len(pairs), confidence)
    return Interval(*(math.exp(value) if value < 700 else math.inf for value in (mean.value, mean.low, mean.high)))


def load_ratio(one: ComparedRun, other: ComparedRun) -> tuple[str, float] | None:
    """(work, ratio of its median seconds in `one` to those in `other`) if equal work took unequal time, `UNEQUAL` or
    more; None if it did not, or with fewer than `MIN_STEPS` common steps. The runs must be set to do the same work.

    Equal work is a trained token (train_s) within a mode or on accelerators; on shared cores trainer and instances slow
    each other down in some modes, so there it is the optimizer's update (update_s), which both run alone.
    """
    apart = {run.config.get("platform.device", "auto") for run in (one, other)} <= {"cuda", "npu"}
    found = []
    if one.mode == other.mode or apart:
        found.append(("tokens", _time_ratios(one, other, "train_s", per_token=True)))
    if one.mode == other.mode or {one.mode, other.mode} <= set(ALONE):
        found.append(("update", _time_ratios(one, other, "update_s")))
    for work, ratios in found:
        if len(ratios) >= MIN_STEPS and not 1 / UNEQUAL < (ratio := statistics.median(ratios)) < UNEQUAL:
            return work, ratio
    return None


def _time_ratios(one: ComparedRun, other: ComparedRun, key: str, per_token: bool = False) -> list[float]:
    """The ratio of a time in each common step after the warm-up."""
    return [
        _time(mine, key, per_token) / _time(theirs, key, per_token)
        for mine, theirs in common_steps(one, other, key, WARM_UP)
        if mine[key] > 0 and theirs[key] > 0 and (not per_token or all(map(_tokens, (mine, theirs))))
    ]


def _time(row: Row, key: str, per_token: bool) -> float:
    return float(row[key]) / (_tokens(row) if per_token else 1.0)


def _tokens(row: Row) -> float:
    """Trained tokens of a step and device; 0 if unknown."""
    known = _number(row.get("tokens_per_s_per_device")) and _number(row.get("step_s"))
    return float(row["tokens_per_s_per_device"] * row["step_s"]) if known else 0.0


def rewarded_steps(one: ComparedRun, other: ComparedRun) -> tuple[list[tuple[Row, Row]], int]:
    """The last third of the common steps, but at least `MIN_STEPS` if there are as many, and the number of all."""
    pairs = common_steps(one, other, "reward_mean")
    return pairs[-max(MIN_STEPS, math.ceil(len(pairs) / 3)) :], len(pairs)


def reward_difference(one: ComparedRun, other: ComparedRun, confidence: float) -> Interval:
    """The mean reward_mean of `one` minus that of `other` over `rewarded_steps`, with blocks as in `speed_ratio`."""
    pairs, _ = rewarded_steps(one, other)
    if not pairs:
        return Interval(math.nan, -math.inf, math.inf)
    means = [
        _mean([mine["reward_mean"] - theirs["reward_mean"] for mine, theirs in block]) for block in split_blocks(pairs)
    ]
    return _interval(means, len(pairs), confidence)


def split_blocks(rows: Sequence[Any]) -> list[Sequence[Any]]:
    """At most `BLOCKS` blocks of neighbours, of nearly equal length."""
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


@dataclass(frozen=True)
class Alignment:
    """Absolute cosines of consecutive gradients (GAC eq. 1) over a run: the columns of GAC's Table 3."""

    mean: float
    p90: float
    """Their 90 % quantile."""
    share: float
    """The share of them that is at most `low`."""
    low: float
    """c_low: the upper end of the on-policy range."""
    recent: float
    """Their mean over the last `RECENT` steps."""

    def __str__(self) -> str:
        return f"mean {self.mean:.3f}, p90 {self.p90:.3f}, {self.share:.0%} up to {self.low:g}"


def gradient_alignment(steps: Sequence[Row], low: str = "") -> Alignment | None:
    """The run's alignment; None if no cosine was measured. `low`: algorithm.gac_low, as text; else the default, as with
    "auto" in a run too short for it."""
    found = [(row["step"], abs(row["grad_cosine"])) for row in steps if row.get("grad_cosine") is not None]
    later = [value for step, value in found if step >= SETTLED]
    values = later if len(later) >= SETTLED else [value for _, value in found]
    if not values:
        return None
    known = [cosine for _, cosine in found]
    limit = LOW if low == "" else upper_end("auto" if low == "auto" else float(low), known) or LOW
    return Alignment(
        mean=statistics.fmean(values),
        p90=sorted(values)[math.ceil(0.9 * len(values)) - 1],
        share=sum(value <= limit for value in values) / len(values),
        low=limit,
        recent=statistics.fmean(value for _, value in found[-RECENT:]),
    )


def signs_of_instability(steps: Sequence[Row], low: str = "") -> list[str]:
    """What GAC calls the sign of instability (§3.2: aligned gradients) and collapse (§3.1: a drop of the reward without
    recovery, or swings), as sentences. The paper gives no numbers; `FALL`, `SMOOTH` and `RECENT` are Metronome's."""
    found = []
    alignment = gradient_alignment(steps, low)
    if alignment is not None and alignment.recent > alignment.low:
        found.append(
            f"the |cosine| of consecutive gradients, {alignment.recent:.3f} on average at the end, has left its "
            f"on-policy range (up to {alignment.low:g}; GAC §3.2)"
        )
    rewards = [row["reward_mean"] for row in steps if _number(row.get("reward_mean"))]
    curve = [statistics.fmean(rewards[at : at + SMOOTH]) for at in range(len(rewards) - SMOOTH + 1)]
    if len(curve) < RECENT:
        return found
    best = max(curve)
    limit = FALL * max(best, 0.25)
    last = curve[-max(SMOOTH, len(curve) // 5) :]
    if max(last) < best - limit:
        found.append(f"collapse: the reward fell from {best:.3f} to {last[-1]:.3f} and did not recover (GAC §3.1)")
    elif (falls := _falls(curve, limit)) > 1:
        found.append(f"the reward swings: {falls} falls of {limit:.3f} or more, each made up for (GAC §3.1)")
    return found


def _falls(curve: Sequence[float], limit: float) -> int:
    """How often the curve falls by `limit` from its highest value since it last rose by as much."""
    falls = 0
    falling = False
    turn = curve[0]
    for value in curve:
        if falling:
            turn = min(turn, value)
            if value >= turn + limit:
                falling = False
                turn = value
        else:
            turn = max(turn, value)
            if value <= turn - limit:
                falling = True
                turn = value
                falls += 1
    return falls


def count_devices(run: ComparedRun) -> int:
    """Devices of training and rollouts, as the speed of its steps counts them; 0 if unknown."""
    rows = [row for row in run.steps if row.get("tokens_per_s_per_device") and row.get("step_s")]
    if not rows or not rows[-1].get("trained_tokens"):
        return 0
    last = rows[-1]
    return round(last["trained_tokens"] / last["step_s"] / last["tokens_per_s_per_device"])
