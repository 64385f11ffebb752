"""Profiles some steps of a run (train.profile)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class StepProfiler:
    """Runs a profiler from the start of the first chosen step to the end of the last."""

    def __init__(self, steps: Sequence[int], make: Callable[[], Any]) -> None:
        """`steps`: first and last step, or empty; `make` returns a profiler (`Platform.profiler`)."""
        self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
        self._make = make
        self._running: Any = None

    def begin_step(self, step: int) -> None:
        """Start the profiler if the step is chosen. A resumed run may start after the first chosen step."""
        if self._running is None and step in self._steps:
            self._running = self._make()
            self._running.start()

    def end_step(self, step: int) -> None:
        """Stop the profiler after the last chosen step."""
        if self._running is not None and step == self._steps[-1]:
            self._running.stop()
            self._running = None
