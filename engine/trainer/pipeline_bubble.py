"""How long a pipeline stage really computes in a window: what is left of the window is the pipeline's bubble."""

from __future__ import annotations

import time

COMPUTING = ("forward-compute", "backward-compute")
"""Megatron's names of the timers around a micro-batch's own work; the others are around waiting for neighbours."""


class ComputeTimer:
    """Stands where Megatron's schedules look for timers (`config.timers`); adds up the seconds of computing.

    On an accelerator these are the host's seconds: work that was queued but not awaited counts where it is awaited.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __call__(self, name: str, log_level: int = 0) -> ComputeTimer | NoTimer:
        """Megatron asks for a timer by name each time."""
        return self if name in COMPUTING else NO_TIMER

    def start(self, barrier: bool = False) -> None:
        """A micro-batch's work begins."""
        self._started = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """It ends."""
        self.seconds += time.perf_counter() - self._started


class NoTimer:
    """A timer that nobody reads."""

    def start(self, barrier: bool = False) -> None:
        """Begin."""

    def stop(self, barrier: bool = False) -> None:
        """End."""


NO_TIMER = NoTimer()
