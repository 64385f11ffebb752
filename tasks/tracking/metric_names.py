"""Turns rows and configs into names and numbers that MLflow accepts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any


def metric_values(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a row by metric name, without `step` and `ended_s`, which say where a figure belongs.

    A list of numbers gives NAME_min, NAME_max and NAME_count; a table of numbers gives NAME/KEY; true is 1. Text is
    left out.
    """
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, int | float) and name not in ("step", "ended_s"):
            found[name] = float(value)
        elif isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value):
            found[f"{name}_count"] = float(len(value))
            found |= {f"{name}_{bound.__name__}": float(bound(value)) for bound in (min, max) if value}
        elif isinstance(value, Mapping):
            found |= {f"{name}/{metric_name(str(key))}": figure for key, figure in metric_values(value).items()}
    return found


SAME_AT_ONE = ("pass_at_k", "pass_ci_low", "pass_ci_high", "maj_at_k", "maj_ci_low", "maj_ci_high", "pass_curve")
BEST_AT_ONE = ("best_at_k_bootstrap", "maj_at_k_bootstrap")
"""Figures of an evaluation that repeat avg@k and its interval if each problem has one response."""


NO_FIGURES = ("weight_version", "protocol", "skipped")
"""Numbers of an evaluation that are not logged as figures. The metrics' step is already the weight version."""


def evaluation_figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a line of evaluations.jsonl as `benchmark/avg_at_k` and so on, without repetitions."""
    left_out = (*NO_FIGURES, *(SAME_AT_ONE + BEST_AT_ONE if row.get("samples") == 1 else ()))
    figures = metric_values({name: value for name, value in row.items() if name not in left_out})
    return {f"{metric_name(row['benchmark'])}/{name}": value for name, value in figures.items()}


def metric_name(text: str) -> str:
    """The text with `_` in place of each character that MLflow does not accept in the name of a metric or model."""
    return clean_name(text, r"[^\w.\- ]", "_")


def clean_name(text: str, pattern: str, filler: str) -> str:
    """The text with `filler` in place of each match of `pattern`. A changed text ends with six digits of its hash, so
    that two texts never share a name, and with it one history."""
    found = re.sub(pattern, filler, text)
    return found if found == text else f"{found}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
