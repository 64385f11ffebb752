"""The seconds that a pipeline stage computes in a window. The rest of the window is the pipeline's bubble."""

from __future__ import annotations

import time

COMPUTING = ("forward-compute", "backward-compute")
"""Megatron's names of the timers around a micro-batch's work. Its other timers measure waiting for neighbours."""


class ComputeTimer:
    """Adds up the seconds of computing. Megatron's schedules find it in `config.timers`.

    These are seconds of the host. Work that is queued on an accelerator counts where the host waits for it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __call__(self, name: str, log_level: int = 0) -> ComputeTimer | NoTimer:
        """Return the timer of this name, as Megatron's schedules ask for it."""
        return self if name in COMPUTING else NO_TIMER

    def start(self, barrier: bool = False) -> None:
        """A micro-batch's work begins."""
        self._started = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """A micro-batch's work ends."""
        self.seconds += time.perf_counter() - self._started


class NoTimer:
    """A timer that nobody reads."""

    def start(self, barrier: bool = False) -> None:
        """Begin."""

    def stop(self, barrier: bool = False) -> None:
        """End."""


NO_TIMER = NoTimer()
