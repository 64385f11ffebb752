"""The lines in which a conversion reports its progress. (Without torch, for the process that reads them.)"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PROGRESS = "progress: "
"""Prefix of such a line."""
PAUSE_S = 1.0
"""Seconds between two lines of a part."""

T = TypeVar("T")


def say_part(number: int, what: str) -> None:
    """Print that a part of the conversion begins; there are four."""
    print(f"{PROGRESS}part {number} of 4: {what}", flush=True)


def count_reads(read: Callable[[str], T], number: int, what: str, total: int) -> Callable[[str], T]:
    """A function that reads a tensor by its name with `read`, and also prints how many were read."""
    say_part(number, what)
    done = 0
    last = time.monotonic()

    def counting(name: str) -> T:
        nonlocal done, last
        done += 1
        if time.monotonic() - last > PAUSE_S:
            last = time.monotonic()
            say_part(number, f"{what}, {done} of {total} tensors")
        return read(name)

    return counting
