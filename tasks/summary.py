"""The results of a finished run, read from its run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.config import Config
from engine.errors import BadInput
from engine.evaluation.tables import rows_of
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.types import JsonObject
from tasks.finished_stages import registered_policy
from tasks.tracking import evaluation_texts, pages


def outcome_rows(config: Config, places: Mapping[str, str]) -> dict[str, str]:
    """The rows of the table at the end of a run: accuracy, reward, speed, places (`places` are rows among these)."""
    folder = RunFolder(config.folder)
    return {**evaluation_texts.closing_rows(folder), **training_rows(config), **places, **pages.page_rows(config)}


def headline(folder: RunFolder) -> str:
    """One line on what a run has reached: steps, reward, accuracy with its interval, champion or why not."""
    steps = list(read_lines(folder.steps))
    parts = [f"{steps[-1]['step'] + 1} steps", f"reward {steps[-1]['reward_mean']:.3f}"] if steps else []
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


def bound_rows(folder: Path) -> dict[str, str]:
    """A row that says what the steps were bound by and which setting is predicted to be faster; no row if the run is
    too short to tell."""
    from engine.tools.planner.planning import run_advice  # imports torch, which takes seconds

    try:
        return {"bound by": run_advice(folder)}
    except BadInput:
        return {}


def _speed(steps: list[JsonObject]) -> str:
    """Mean speed over all steps except the first, in which caches are cold."""
    counted = steps[1:] or steps
    seconds = sum(row["step_s"] for row in counted)
    tokens = sum(row["tokens_per_s_per_device"] * row["step_s"] for row in counted)
    return f"{len(counted) / seconds:.2f} steps/s, {tokens / seconds:,.0f} trained tokens/s/device"
