"""The comparison as one HTML file that opens offline: verdict, table, curves, wall time, benchmarks, settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from engine.errors import counted
from engine.run.files import write_atomically
from engine.tools.comparison import accuracy, run_figures
from engine.tools.comparison.accuracy import Difference
from engine.tools.comparison.run_figures import ComparedRun, Interval, Row
from engine.tools.comparison.verdict import Verdict, config_differences, format_percent, judge_runs
from engine.tools.pages import assemble_page
from engine.tools.timeline import COLORS
from engine.tools.watch.run_view import columns_of

POINTS = 400
"""Largest number of points of a curve. A longer one is drawn as means of neighbouring steps."""
PARTS = {
    "sync_s": ("weight sync", "sync"),
    "check_s": ("compare weights", "check"),
    "wait_s": ("wait for responses", "wait"),
    "train_s": ("train", "train"),
    "update_s": ("update", "update"),
    "other_s": ("other", "out"),
}
"""The parts of a step's time, each with its name on the page and the timeline's name for its colour. (The names differ
because a run may be called "sync".)"""
ROLLOUT = ("rollout, at the same time", "rollout")
NOTES = (
    "Tokens/s/device: prompt and response tokens of the trained responses, by step time and by all devices, training "
    "and rollouts together. The first step of a run does not count for speed.",
    "Wall time is the sum of the steps' times. Start-up, evaluations outside steps, pauses and redone steps are not in "
    "it.",
    "Parts of a step's time: the upper bar is the trainer (it sends weights, waits for their comparison, waits for "
    "responses, trains, updates); the thin bar is the rollout. In sync one follows the other, in periodic they "
    "overlap.",
    "Reward at the end: the mean of a run's last fifth of steps. Curves of more than 60 steps have a faint line for "
    "the steps and a bold line for the moving average. Entropy and KL are means over the tokens of the responses, in "
    "nats.",
    "Intervals of speed and reward come from six blocks of neighbouring steps (batch means, Student's t). Accuracy is "
    "paired by problem if both runs have a table of the benchmark (t interval; sign-flip test). Otherwise it is the "
    "difference of two Wilson intervals (Newcombe). With several runs the intervals of a kind are widened so that they "
    "hold together: those of speed and of reward for all runs, those of accuracy for all runs and benchmarks "
    "(Bonferroni).",
    "These intervals hold for these runs. They do not include the effect of another seed, another machine or other "
    "load: repeat runs to measure it.",
)


def write_page(runs: Sequence[ComparedRun], target: Path) -> list[Verdict]:
    """Write the page. Return the verdict on each run except the first."""
    found = judge_runs(runs)
    page = assemble_page(Path(__file__).resolve().parent, _finite(_content(runs, found)))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page)
    return found


def summary_table(runs: Sequence[ComparedRun]) -> tuple[list[str], list[list[str]]]:
    """Columns and a row per run, for the page and the console; only the accuracies if a run has no steps."""
    names = accuracy.benchmark_names(list(runs))
    figures = [f"{name}: {accuracy.kind_of(runs, name)}" for name in names]
    if not all(run.steps for run in runs):
        return ["run", *figures], [[run.name, *(_accuracy(run, name) for name in names)] for run in runs]
    columns = ["run", "mode", "steps", "wall time", "trained tokens", "devices", "s/step", "tokens/s/device"]
    aligned = [run_figures.gradient_alignment(run.steps, run.config.get("algorithm.gac_low", "")) for run in runs]
    cosines = [[str(one or "not measured")] for one in aligned] if any(aligned) else [[] for _ in runs]
    head = ["|cosine| of gradients"] if any(aligned) else []
    rows = [
        [*_row(run), *more, *(_accuracy(run, name) for name in names)] for run, more in zip(runs, cosines, strict=True)
    ]
    return [*columns, "reward at the end", *head, *figures], rows


def _row(run: ComparedRun) -> list[str]:
    seconds = sum(run_figures.elapsed_seconds(run).values(), 0.0) and max(run_figures.elapsed_seconds(run).values())
    rewards = [value for _, value in run_figures.figure_series(run, "reward_mean")]
    end = rewards[-max(1, math.ceil(len(rewards) / 5)) :]
    return [
        run.name,
        run.mode,
        _steps(run),
        f"{seconds:,.0f} s" if seconds < 3600 else f"{seconds / 3600:,.2f} h",
        f"{tokens:,.0f}" if (tokens := sum(row.get("trained_tokens", 0) for row in run.steps)) else "unknown",
        str(run_figures.count_devices(run) or "unknown"),
        _text(run_figures.step_breakdown(run)["step_s"], ".2f"),
        _text(run_figures.mean_speed(run_figures.counted_steps(run)), ",.0f"),
        _text(sum(end) / len(end) if end else math.nan, ".3f"),
    ]


def _steps(run: ComparedRun) -> str:
    if run.complete:
        return str(len(run.steps))
    return f"{run.trained} of {run.planned}, {'failed' if run.failure else 'unfinished'}"


def _accuracy(run: ComparedRun, name: str) -> str:
    row = accuracy.last_evaluation(run, name)
    if row is None:
        return "not evaluated"
    interval = f" [{row['ci_low']:.3f}, {row['ci_high']:.3f}]" if "ci_low" in row and "ci_high" in row else ""
    return f"{row['avg_at_k']:.3f}{interval}"


def _text(value: float, form: str) -> str:
    return "unknown" if math.isnan(value) else format(value, form)


def _content(runs: Sequence[ComparedRun], found: Sequence[Verdict]) -> dict[str, Any]:
    """The data for the page's script."""
    columns, rows = summary_table(runs)
    return {
        "title": f"{', '.join(run.name for run in runs[1:])} against {runs[0].name}",
        "runs": [run.name for run in runs],
        "verdicts": [{"answer": one.answer, "sentences": one.sentences, "cautions": one.cautions} for one in found],
        "table": {"columns": columns, "rows": rows},
        "columns": [_columns(run) for run in runs],
        "parts": [{"name": name, "kind": kind, "color": COLORS[kind]} for name, kind in (*PARTS.values(), ROLLOUT)],
        "bars": _bars(runs),
        "forest": _forest(runs, found),
        "differences": [[key, *values] for key, values in config_differences(runs).items()],
        "notes": NOTES,
    }


def _columns(run: ComparedRun) -> dict[str, list[float | None]]:
    """The figures of a run's steps by column, with the minutes of training at their ends."""
    minutes = [seconds / 60 for seconds in run_figures.elapsed_seconds(run).values()]
    size = math.ceil(len(run.steps) / POINTS)
    return {name: _thin(values, size) for name, values in (columns_of(run.steps) | {"minutes": minutes}).items()}


def _thin(values: Sequence[float | None], size: int) -> list[float | None]:
    """Means of `size` neighbours each."""
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    known = [[value for value in part if value is not None] for part in parts]
    return [fmean(part) if part else None for part in known]


def _bars(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    bars = []
    for number, run in enumerate(runs):
        means = run_figures.step_breakdown(run)
        parts = [(name, means[key]) for key, (name, _) in PARTS.items() if not math.isnan(means[key])]
        if not math.isnan(means["step_s"]):
            rollout = 0.0 if math.isnan(means["rollout_s"]) else means["rollout_s"]
            bars.append({"run": number, "step": means["step_s"], "rollout": rollout, "parts": parts})
    return bars


def _forest(runs: Sequence[ComparedRun], found: Sequence[Verdict]) -> list[dict[str, Any]]:
    """For each benchmark, a group with the accuracies of the runs, and a group with their differences from the first
    run."""
    groups = []
    for name in accuracy.benchmark_names(list(runs)):
        rows = [(number, run, accuracy.last_evaluation(run, name)) for number, run in enumerate(runs)]
        drawn = [
            _bar(
                number,
                f"{run.name}: {_accuracy(run, name)}",
                _sampled(row),
                Interval(row["avg_at_k"], row["ci_low"], row["ci_high"]),
            )
            for number, run, row in rows
            if row is not None and "ci_low" in row and "ci_high" in row
        ]
        figure = f"{accuracy.kind_of(runs, name)} avg@k"
        title = f"{name}: {figure} with its 95 % interval"
        groups += [{"title": title, "x": figure, "rows": drawn}] if drawn else []
        groups += _against(name, figure, found)
    return groups


def _bar(run: int, label: str, hint: str, of: Interval) -> dict[str, Any]:
    return {"run": run, "label": label, "hint": hint, "value": of.value, "low": of.low, "high": of.high}


def _sampled(row: Row) -> str:
    given = counted(int(row["problems"]), "problem") if "problems" in row else "problems not known"
    each = counted(int(row.get("samples", 1)), "response")
    return f"{given} with {each} each, after {counted(row['step'], 'update')}"


def _against(name: str, figure: str, found: Sequence[Verdict]) -> list[dict[str, Any]]:
    rows = [
        _bar(number, _told(verdict, one), _how(one), one.interval)
        for number, verdict in enumerate(found, start=1)
        for one in verdict.accuracy
        if one.benchmark == name and one.interval.known
    ]
    if not rows:
        return []
    level = next(one.level for verdict in found for one in verdict.accuracy)  # the same for all
    title = f"{name}: difference from {found[0].base.name}, with {format_percent(level)} intervals"
    return [{"title": title, "x": f"difference of {figure}", "rows": rows, "zero": 0}]


def _told(verdict: Verdict, one: Difference) -> str:
    return f"{verdict.run.name}: {one.interval.value:+.3f} [{one.interval.low:+.3f}, {one.interval.high:+.3f}]"


def _how(one: Difference) -> str:
    kind = f"paired, {counted(one.problems, 'problem')}" if one.paired else "not paired"
    return kind + (
        f", p = {one.p_value:.2g}, better on {one.better}, worse on {one.worse}" if one.p_value is not None else ""
    )


def _finite(value: Any) -> Any:  # noqa: ANN401
    """The value with null in place of numbers that are not finite, because JSON has no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
