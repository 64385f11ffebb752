"""The results of a finished run, read from its run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from engine.config import Config
from engine.errors import BadInput, counted
from engine.evaluation.tables import rows_of
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.tools.comparison.run_figures import gradient_alignment, signs_of_instability
from engine.types import JsonObject
from tasks.attempt import registered_policy
from tasks.tracking import evaluation_texts, tracked_run


def outcome_rows(config: Config, places: Mapping[str, str]) -> dict[str, str]:
    """The rows of the table at the end of a run: accuracy, reward, speed, places (`places` are rows among these)."""
    folder = RunFolder(config.folder)
    return {**evaluation_texts.closing_rows(folder), **training_rows(config), **places, **tracked_run.page_rows(config)}


def headline(folder: RunFolder) -> str:
    """One line on what a run has reached: steps, reward, accuracy with its interval, champion or why not."""
    steps = list(read_lines(folder.steps))
    parts = [counted(steps[-1]["step"] + 1, "step"), f"reward {steps[-1]['reward_mean']:.3f}"] if steps else []
    if evaluated := rows_of(folder):
        parts.append(evaluation_texts.describe_evaluation(evaluated[-1]))
    if (made := registered_policy(folder)) is not None:
        parts.append(f"version {made.version} of {made.name} is {made.verdict}")
    return "; ".join(parts) or "nothing yet"


def training_rows(config: Config) -> dict[str, str]:
    """The rows about the training: reward, speed, places."""
    folder = RunFolder(config.folder)
    steps = list(read_lines(folder.steps))
    return {
        **_figures(steps),
        **_nothing_learned(folder, steps, config.train.prompts_per_step),
        **_responses(steps),
        **_stability(steps, str(config.algorithm.gac_low)),
        **bound_rows(folder.path),
        "run folder": str(folder.path),
        "timeline": str(folder.path / "timeline.html"),
        "trained policy": str(folder.policy),
    }


def _figures(steps: list[JsonObject]) -> dict[str, str]:
    """Rows with reward and speed. There are no steps if the run folder was lost after the last checkpoint."""
    if not steps:
        return {"reward": "not known: the steps were lost with the run folder"}
    reward = " to ".join(f"{row['reward_mean']:.3f} (step {row['step']})" for row in (steps[0], steps[-1]))
    return {"reward": reward, "speed": _speed(steps)}


def _nothing_learned(folder: RunFolder, steps: list[JsonObject], groups: int) -> dict[str, str]:
    """A row that says so if no group of the run had unequal scores."""
    whole = groups * len(steps)
    if not steps or sum(row.get("equal_groups", 0) for row in steps) < whole:
        return {}
    where = next((path for _, path in folder.all_samples()), folder.responses)
    return {"learned nothing": f"all {counted(whole, 'group')} had equal scores; why: {where}, metronome try-reward"}


def _responses(steps: list[JsonObject]) -> dict[str, str]:
    """A row with the lengths of the last ten steps."""
    last = steps[-10:]
    longest = max((row.get("response_length_max", 0) for row in last), default=0)
    if not longest:
        return {}
    mean, p90, tail = (fmean(row[f"response_length_{name}"] for row in last) for name in ("mean", "p90", "tail"))
    text = f"mean {mean:,.0f} tokens, 90 % up to {p90:,.0f}, longest {longest:,}; {tail:.0%} in the longest tenth"
    return {"responses": text}


def _stability(steps: list[JsonObject], low: str) -> dict[str, str]:
    """Rows about the cosine of consecutive gradients, and about what GAC calls instability; none of a run without."""
    alignment = gradient_alignment(steps, low)
    signs = signs_of_instability(steps, low)
    return ({"|cosine|": str(alignment)} if alignment else {}) | ({"warning": "; ".join(signs)} if signs else {})


def bound_rows(folder: Path) -> dict[str, str]:
    """A row that says what the steps were bound by and what helps against it; none if the run is too short to tell."""
    from engine.tools.planner.calibration import describe_bound  # imports torch, which takes seconds

    try:
        return {"bound by": describe_bound(folder)}
    except BadInput:
        return {}


def _speed(steps: list[JsonObject]) -> str:
    """Mean speed over all steps except the first, in which caches are cold."""
    counted = steps[1:] or steps
    seconds = sum(row["step_s"] for row in counted)
    tokens = sum(row["tokens_per_s_per_device"] * row["step_s"] for row in counted)
    return f"{len(counted) / seconds:.2f} steps/s, {tokens / seconds:,.0f} trained tokens/s/device"
