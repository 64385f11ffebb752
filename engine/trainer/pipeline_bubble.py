"""The seconds that a pipeline stage computes in a window, and the spans of a profile. The rest of the window is the
pipeline's bubble."""

from __future__ import annotations

import time

from torch.profiler import record_function

COMPUTING = ("forward-compute", "backward-compute")
"""Megatron's names of the timers around a micro-batch's work. Its other timers measure waiting for neighbours."""


class ComputeTimer:
    """Adds up the seconds of computing, which a profile has as "forward" and "backward". Megatron's schedules find it
    in `config.timers`.

    These are seconds of the host. Work that is queued on an accelerator counts where the host waits for it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0
        self._name = ""
        self._span = record_function(self._name)

    def __call__(self, name: str, log_level: int = 0) -> ComputeTimer | NoTimer:
        """Return the timer of this name, as Megatron's schedules ask for it."""
        if name not in COMPUTING:
            return NO_TIMER
        self._name = name.removesuffix("-compute")
        return self

    def start(self, barrier: bool = False) -> None:
        """A micro-batch's work begins."""
        self._span = record_function(self._name)
        self._span.__enter__()
        self._started = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """A micro-batch's work ends."""
        self.seconds += time.perf_counter() - self._started
        self._span.__exit__(None, None, None)


class NoTimer:
    """A timer that nobody reads."""

    def start(self, barrier: bool = False) -> None:
        """Begin."""

    def stop(self, barrier: bool = False) -> None:
        """End."""


NO_TIMER = NoTimer()
