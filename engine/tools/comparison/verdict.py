"""Turns figures into sentences, one for each question. No sentence is more certain than its figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import counted
from engine.tools.comparison import accuracy as accuracies
from engine.tools.comparison import run_figures
from engine.tools.comparison.accuracy import Difference
from engine.tools.comparison.run_figures import ComparedRun, Interval, Row

CONFIDENCE = 0.95
"""Joint confidence of all intervals of a kind (speed, reward, accuracy). Each of k intervals has 1 - 0.05 / k
(Bonferroni). There is one interval for each run except the first; for accuracy, one for each such run and benchmark."""
NOT_SURE = "not enough steps to be sure"
MOST_FACTOR = 100
"""If deciding takes more than this many times the steps, no number of steps is given."""
MODE_KEYS = ("train.mode", "train.max_staleness", "train.exact_lag")
"""Keys that define how a run is asynchronous. Runs in different modes are meant to differ in them."""
WORK = (
    "model.",
    "parallel.",
    "platform.",
    "attention.",
    "algorithm.",
    "train.",
    "rollout.instances",
    "rollout.devices",
)
"""How the keys begin that change how long training takes for the same tokens."""
SAME_WORK = (*MODE_KEYS, "train.steps", "train.learning_rate")
"""Keys among them that do not."""
UNKNOWN = Interval(math.nan, -math.inf, math.inf)
"""An unknown figure."""
GRADES = {
    "better": "better",
    "worse": "worse",
    "none": "with no visible difference",
    "open": "not shown to be better or worse",
    "unknown": "of unknown quality",
}
"""The result of an interval of a difference, as text."""
PLACES = (
    "run.name",
    "run.output",
    "tracking.uri",
    "tracking.experiment",
    "tracking.also",
    "checkpoint.path",
    "checkpoint.keep_last",
)
"""Keys that change where files are, not how a run behaves."""


@dataclass(frozen=True)
class Verdict:
    """The comparison of one run with the first."""

    run: ComparedRun
    base: ComparedRun
    speed: Interval
    """Ratio of tokens/s/device."""
    reward: Interval
    """Difference of reward over `rewarded_steps`."""
    accuracy: tuple[Difference, ...]
    answer: str
    """One sentence: is the run faster, and is it as good?"""
    sentences: tuple[str, ...]
    """Sentences with the figures: speed, each benchmark, reward, wall time."""
    cautions: tuple[str, ...]
    """Other possible causes of the difference."""


def judge_runs(runs: Sequence[ComparedRun]) -> list[Verdict]:
    """Compare each run except the first with the first."""
    others = len(runs) - 1
    sure = joint_confidence(others)
    sure_of_accuracy = joint_confidence(others * len(accuracies.benchmark_names(list(runs))))
    return [_verdict(run, runs[0], sure, sure_of_accuracy) for run in runs[1:]]


def judge_evaluations(runs: Sequence[ComparedRun]) -> list[str]:
    """A sentence for each benchmark of each run that the first one has, too."""
    names = accuracies.benchmark_names(list(runs))
    sure = joint_confidence((len(runs) - 1) * len(names))
    pairs = [(run, accuracies.accuracy_difference(run, runs[0], name, sure)) for run in runs[1:] for name in names]
    return [_as_accurate((run.name, runs[0].name), found) for run, found in pairs if found is not None]


def joint_confidence(intervals: int) -> float:
    """The confidence of each of `intervals` intervals with which all hold together at `CONFIDENCE`."""
    return 1 - (1 - CONFIDENCE) / max(1, intervals)


def format_percent(level: float) -> str:
    """0.975 → "97.5%"."""
    return f"{level:.1%}".replace(".0%", "%")


def config_differences(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Config keys whose values differ, with the value in each run ("not set" if it has none). Names and places are left
    out."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in PLACES)
    rows = {key: [run.config.get(key, "not set") for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _verdict(run: ComparedRun, base: ComparedRun, sure: float, sure_of_accuracy: float) -> Verdict:
    speed = run_figures.speed_ratio(run, base, sure)
    reward = run_figures.reward_difference(run, base, sure)
    pairs = run_figures.common_steps(run, base, "step_s")
    found = [
        accuracies.accuracy_difference(run, base, name, sure_of_accuracy)
        for name in accuracies.benchmark_names([run, base])
    ]
    accuracy = tuple(one for one in found if one is not None)
    who = _who(run), _who(base)
    level = format_percent(sure)
    steps = len(run_figures.common_steps(run, base, "tokens_per_s_per_device", run_figures.WARM_UP))
    load = _load(run, base)
    sentences = [
        _not_compared(who, speed) if load else _faster(who, speed, level, steps),
        *(_as_accurate(who, one) for one in accuracy),
        _as_rewarded(who=who, found=reward, level=level, evaluated=bool(accuracy), which=_rewarded(run, base)),
        *_wall_time(run, base, pairs),
        *_compared(run, base),
    ]
    known = UNKNOWN if load or steps < run_figures.MIN_STEPS else speed
    answer = load + _answer(who=who, speed=known, accuracy=accuracy, reward=reward, loaded=bool(load))
    return Verdict(run, base, speed, reward, accuracy, answer, tuple(sentences), tuple(_cautions(run, base)))


def _who(run: ComparedRun) -> str:
    return run.name if run.name == run.mode else f"{run.name} ({run.mode})"


def _load(run: ComparedRun, base: ComparedRun) -> str:
    """A sentence that says that the two ran under another load, if equal work took unequal time; else ""."""
    others = [key for key in config_differences([base, run]) if key.startswith(WORK) and key not in SAME_WORK]
    found = None if others else run_figures.load_ratio(run, base)
    if found is None:
        return ""
    work, ratio = found
    slow, fast = (run.name, base.name) if ratio > 1 else (base.name, run.name)
    return (
        f"Another load: {slow} took {max(ratio, 1 / ratio):.1f} times as long as {fast} for the same {work}, so the "
        "machine was busier, or another one, and the speeds say nothing. "
    )


def _not_compared(who: tuple[str, str], ratio: Interval) -> str:
    return f"Speed: {who[0]} was {ratio.value:.2f} times as fast as {who[1]}, but under another load."


def _answer(
    who: tuple[str, str], speed: Interval, accuracy: Sequence[Difference], reward: Interval, loaded: bool
) -> str:
    """Both questions in one sentence. Without a benchmark, quality is judged by the training reward."""
    unlike = " (evaluated differently)"
    measured = [
        (f"on {one.benchmark}{unlike if one.notes else ''}", _side(one.interval, one.agreed)) for one in accuracy
    ]
    measured = measured or [("by its reward in training", _side(reward))]
    sides = [side for _, side in measured]
    against = speed.known and ((speed.low > 1 and "worse" in sides) or (speed.high < 1 and "better" in sides))
    quality = ", ".join(f"{GRADES[side]} {what}" for what, side in measured)
    pace = "of unknown speed" if loaded else _pace(speed)
    return f"{who[0]} was {pace}, {'but' if against else 'and'} {quality}, compared with {who[1]}."


def _pace(speed: Interval) -> str:
    if not speed.known:
        return "of unknown speed (too few common steps)"
    if speed.low <= 1 <= speed.high:
        return f"{speed.value:.2f} times as fast in these runs ({speed.low:.2f} to {speed.high:.2f}: {NOT_SURE})"
    return f"{'faster' if speed.low > 1 else 'slower'} ({speed.value:.2f} times as fast)"


def _side(found: Interval, agreed: bool = True) -> str:
    """A key of `GRADES`. `agreed`: whether a test also finds a difference, or there is no test."""
    if not found.known:
        return "unknown"
    if found.low == found.high == 0:
        return "none"
    if not agreed or found.low <= 0 <= found.high:
        return "open"
    return "better" if found.low > 0 else "worse"


def _faster(who: tuple[str, str], ratio: Interval, level: str, steps: int) -> str:
    if math.isnan(ratio.value):
        return f"Speed: {who[0]} and {who[1]} have no steps in common after the warm-up, the first step."
    told = f"{ratio.value:.2f} times as fast as {who[1]}"
    if not ratio.known or steps < run_figures.MIN_STEPS:
        few = f"but {steps} common steps after the warm-up are too few for an interval"
        return f"Speed: {who[0]} was {told}, {few}."
    sure = f"{level} interval {ratio.low:.2f} to {ratio.high:.2f}, tokens/s/device over {steps} common steps"
    if ratio.low > 1:
        return f"Speed in these runs: {who[0]} was faster: {told} ({sure})."
    if ratio.high < 1:
        return f"Speed in these runs: {who[0]} was slower: {told} ({sure})."
    return f"Speed in these runs: {who[0]} was {told} ({sure}): {NOT_SURE}{_more(ratio, steps)}."


def _more(ratio: Interval, steps: int) -> str:
    """How many further steps would decide, if ratio and noise stay the same. The interval of the log ratio shrinks with
    the square root of the steps."""
    value, low, high = (math.log(one) for one in (ratio.value, ratio.low, ratio.high))
    half = value - low if value > 0 else high - value
    needed = steps * (half / value) ** 2 if value else math.inf
    if needed > MOST_FACTOR * steps:
        most = max(abs(math.expm1(low)), abs(math.expm1(high)))
        return f"; the two are nearly alike: a difference of more than {most:.0%} is unlikely"
    more = max(1, math.ceil(needed - steps))
    digits = max(0, len(str(more)) - 2)
    return f"; about {counted(math.ceil(more / 10**digits) * 10**digits, 'more step')} would be enough"


def _as_accurate(who: tuple[str, str], found: Difference) -> str:
    problems = counted(found.problems, "problem")
    kind = f"paired over {problems}" if found.paired else f"unpaired, {problems}"
    kind += (
        f", p = {found.p_value:.2g}"
        if found.p_value is not None and not found.agreed and found.better + found.worse
        else ""
    )
    notes = f" Careful: {'; '.join(found.notes)}." if found.notes else ""
    sided = _sided(who=who, found=found.interval, level=format_percent(found.level), kind=kind, agreed=found.agreed)
    return f"Evaluation on {found.benchmark}: {sided}{notes}"


def _rewarded(run: ComparedRun, base: ComparedRun) -> str:
    """Over which steps the rewards are compared."""
    last, of = run_figures.rewarded_steps(run, base)
    return f"last {len(last)} of {of} common steps" if len(last) < of else f"all {counted(of, 'common step')}"


def _as_rewarded(who: tuple[str, str], found: Interval, level: str, evaluated: bool, which: str) -> str:
    hint = (
        ""
        if evaluated
        else " There is no evaluation of trained weights in both runs, so this is the only measure of quality."
    )
    if math.isnan(found.value):
        return f"Reward: no steps in common to compare.{hint}"
    return f"Reward in training ({which}): {_sided(who, found, level, 'by blocks of steps')}{hint}"


def _sided(who: tuple[str, str], found: Interval, level: str, kind: str, agreed: bool = True) -> str:
    side = _side(found, agreed)
    if side == "unknown":
        return f"{who[0]} {found.value:+.3f} against {who[1]}; too little data for an interval."
    sure = f"{found.value:+.3f}, {level} interval {found.low:+.3f} to {found.high:+.3f}, {kind}"
    if side in ("better", "worse"):
        return f"{who[0]} was {side} ({sure})."
    if side == "none":
        return f"{GRADES[side]} ({kind})."
    most = max(abs(found.low), abs(found.high))
    return f"no difference shown ({sure}); one of more than {most:.3f} is unlikely."


def _wall_time(run: ComparedRun, base: ComparedRun, pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    if not pairs:
        return []
    mine, theirs = (sum(pair[side]["step_s"] for pair in pairs) for side in (0, 1))
    which = "one common step" if len(pairs) == 1 else f"{len(pairs)} common steps"
    return [f"Wall time of the {which}: {run.name} {mine:,.0f} s, {base.name} {theirs:,.0f} s."]


def _cautions(run: ComparedRun, base: ComparedRun) -> list[str]:
    told = [_ended(one) for one in (base, run) if not one.complete]
    told += [
        f"{one.name}: {sign}."
        for one in (base, run)
        for sign in run_figures.signs_of_instability(one.steps, one.config.get("algorithm.gac_low", ""))
    ]
    _, others = _meant(run, base)
    if others:
        shown = ", ".join(others[:6]) + (f" and {len(others) - 6} more" if len(others) > 6 else "")
        told.append(f"The two also differ in {shown}, which may be the cause of a difference.")
    if run.steps and base.steps and len(run.steps) != len(base.steps):
        told.append(
            f"{run.name} has {counted(len(run.steps), 'step')}, {base.name} {len(base.steps)}; only common steps are "
            "compared."
        )
    return told


def _meant(run: ComparedRun, base: ComparedRun) -> tuple[list[str], list[str]]:
    """The keys in which two runs were meant to differ, and the other keys in which they differ. Meant are the keys of
    the mode, or a key that is the only difference."""
    differ = list(config_differences([base, run]))
    meant = [key for key in differ if key in MODE_KEYS] if "train.mode" in differ else []
    meant = meant or (differ if len(differ) == 1 else [])
    return meant, [key for key in differ if key not in meant]


def _compared(run: ComparedRun, base: ComparedRun) -> list[str]:
    """A sentence that says what is compared, if that is clear."""
    meant, _ = _meant(run, base)
    both = [f"{key} ({base.config.get(key, 'not set')}, {run.config.get(key, 'not set')})" for key in meant]
    return [f"Compared: {', '.join(both)}."] if both else []


def _ended(run: ComparedRun) -> str:
    done = f"{run.trained:,} of {counted(run.planned, 'step')}"
    if run.failure:
        return f"{run.name} failed after {done}: {run.failure}"
    return f"{run.name} has only {done}: it is still running, or it was stopped."
