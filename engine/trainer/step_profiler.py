"""The profile of some steps of a run (train.profile)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class StepProfiler:
    """Runs a profiler from the beginning of the first chosen step to the end of the last."""

    def __init__(self, steps: Sequence[int], make: Callable[[], Any]) -> None:
        """`steps`: the first and the last one, or empty; `make` returns a profiler (`Platform.profiler`)."""
        self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
        self._make = make
        self._running: Any = None

    def begin(self, step: int) -> None:
        """A step begins. A resumed run may begin with one after the first."""
        if self._running is None and step in self._steps:
            self._running = self._make()
            self._running.start()

    def end(self, step: int) -> None:
        """A step ends."""
        if self._running is not None and step == self._steps[-1]:
            self._running.stop()
            self._running = None
