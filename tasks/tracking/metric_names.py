"""Turns rows and configs into names and numbers that MLflow accepts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a row by metric name, without `step`.

    A list of numbers gives NAME_min, NAME_max and NAME_count; a table of numbers gives NAME/KEY; true is 1; text is
    left out.
    """
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, int | float) and name != "step":
            found[name] = float(value)
        elif isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value):
            found[f"{name}_count"] = float(len(value))
            found |= {f"{name}_{bound.__name__}": float(bound(value)) for bound in (min, max) if value}
        elif isinstance(value, Mapping):
            found |= {f"{name}/{metric_name(str(key))}": figure for key, figure in numbers(value).items()}
    return found


def metric_name(text: str) -> str:
    """The text with `_` for each character that MLflow does not accept in the name of a metric or model."""
    return re.sub(r"[^\w.\- ]", "_", text)
