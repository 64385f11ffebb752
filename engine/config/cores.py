"""The CPU cores that keys of a recipe name, against those that this process may use."""

from __future__ import annotations

import os
from collections.abc import Sequence


def foreign_cores(key: str, cores: Sequence[int]) -> str:
    """What is wrong with the cores that a key names on this machine, "" if nothing."""
    missing = sorted(set(cores) - usable_cores())
    return (
        f"{key} names cores {missing}, which this process can't use; it has {sorted(usable_cores())}" if missing else ""
    )


def usable_cores() -> set[int]:
    """CPU cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
