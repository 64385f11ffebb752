"""One sentence for each question, computed from the figures and never surer than they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.comparison import benchmarks, figures
from engine.comparison.benchmarks import Difference
from engine.comparison.figures import Interval, Row, Run

CONFIDENCE = 0.95
"""Of all intervals against the first run together: with k other runs each has 1 - 0.05 / k (Bonferroni)."""
PLACES = ("run.name", "run.output", "tracking.uri", "tracking.experiment", "checkpoint.path", "checkpoint.keep_last")
"""Keys that change where things lie, not what a run does."""


@dataclass(frozen=True)
class Verdict:
    """One run against the first."""

    run: Run
    base: Run
    speed: Interval
    """Ratio of tokens/s/device."""
    reward: Interval
    """Difference of reward over the last third of the common steps."""
    accuracy: tuple[Difference, ...]
    sentences: tuple[str, ...]


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """Each run but the first against the first."""
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(runs) - 1)
    return [_verdict(run, runs[0], confidence) for run in runs[1:]]


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Config keys whose values differ, with each run's value ("not set" where it has none); names and places left out."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in PLACES)
    rows = {key: [run.config.get(key, "not set") for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _verdict(run: Run, base: Run, confidence: float) -> Verdict:
    speed = figures.speed_ratio(run, base, confidence)
    reward = figures.reward_difference(run, base, confidence)
    pairs = figures.common(run, base, "step_s")
    found = [benchmarks.difference(run, base, name, confidence) for name in benchmarks.names([run, base])]
    accuracy = tuple(one for one in found if one is not None)
    who = _who(run), _who(base)
    level = f"{confidence:.1%}".replace(".0%", "%")
    sentences = [
        _faster(who, speed, level, len(figures.common(run, base, "tokens_per_s_per_device", figures.WARM_UP))),
        *(_as_accurate(who, one, level) for one in accuracy),
        _as_rewarded(who, reward, level, bool(accuracy)),
        *_limits(run, base, pairs),
    ]
    return Verdict(run, base, speed, reward, accuracy, tuple(sentences))


def _who(run: Run) -> str:
    return run.name if run.name == run.mode else f"{run.name} ({run.mode})"


def _faster(who: tuple[str, str], ratio: Interval, level: str, steps: int) -> str:
    if math.isnan(ratio.value):
        return f"Speed: {who[0]} and {who[1]} have no steps in common to compare."
    told = f"{ratio.value:.2f} times the tokens/s/device of {who[1]}"
    if not ratio.known or steps < figures.MIN_STEPS:
        return f"Speed: {who[0]} had {told}, but {steps} common steps after the warm-up are too few to say how sure that is."
    sure = f"{level} interval {ratio.low:.2f} to {ratio.high:.2f}, {steps} common steps"
    if ratio.low > 1:
        return f"Speed in these runs: {who[0]} was faster: {told} ({sure})."
    if ratio.high < 1:
        return f"Speed in these runs: {who[0]} was slower: {told} ({sure})."
    return f"Speed in these runs: no difference shown; {who[0]} had {told} ({sure})."


def _as_accurate(who: tuple[str, str], found: Difference, level: str) -> str:
    kind = f"paired over {found.problems} problems" if found.paired else f"unpaired, {found.problems} problems"
    notes = f" Careful: {'; '.join(found.notes)}." if found.notes else ""
    return f"Accuracy on {found.benchmark}: {_sided(who, found.interval, level, kind)}{notes}"


def _as_rewarded(who: tuple[str, str], found: Interval, level: str, evaluated: bool) -> str:
    hint = "" if evaluated else " There is no evaluation of trained weights in both runs, so this is the only measure of quality."
    if math.isnan(found.value):
        return f"Reward: no steps in common to compare.{hint}"
    return f"Reward in training (last third of the common steps): {_sided(who, found, level, 'by blocks of steps')}{hint}"


def _sided(who: tuple[str, str], found: Interval, level: str, kind: str) -> str:
    if not found.known:
        return f"{who[0]} {found.value:+.3f} against {who[1]}; too little data for an interval."
    sure = f"{found.value:+.3f}, {level} interval {found.low:+.3f} to {found.high:+.3f}, {kind}"
    if found.low > 0:
        return f"{who[0]} was better ({sure})."
    if found.high < 0:
        return f"{who[0]} was worse ({sure})."
    if found.low == found.high == 0:
        return f"equal throughout ({kind})."
    most = max(abs(found.low), abs(found.high))
    return f"no difference shown ({sure}); one of more than {most:.3f} is unlikely."


def _limits(run: Run, base: Run, pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    told = []
    if pairs:
        mine, theirs = (sum(pair[side]["step_s"] for pair in pairs) for side in (0, 1))
        told.append(f"Wall time of the {len(pairs)} common steps: {mine:,.0f} s against {theirs:,.0f} s.")
    others = [key for key in differences([base, run]) if key != "train.mode"]
    if others:
        shown = ", ".join(others[:6]) + (f" and {len(others) - 6} more" if len(others) > 6 else "")
        told.append(f"The two also differ in {shown}: what is said here may be due to that.")
    if run.steps and base.steps and len(run.steps) != len(base.steps):
        told.append(f"{run.name} has {len(run.steps)} steps, {base.name} {len(base.steps)}; only common steps are compared.")
    return told
