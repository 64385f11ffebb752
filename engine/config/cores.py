"""Whether this process may use the CPU cores that a recipe names."""

from __future__ import annotations

import os
from collections.abc import Sequence


def foreign_cores(key: str, cores: Sequence[int]) -> str:
    """Return what is wrong with the cores that a key names on this machine, or "" if nothing is."""
    missing = sorted(set(cores) - usable_cores())
    return (
        f"{key} names cores {missing}, which this process can't use; it has {sorted(usable_cores())}" if missing else ""
    )


def usable_cores() -> set[int]:
    """Numbers of the CPU cores that this process may use; all of the machine where the system can't tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
