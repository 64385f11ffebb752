"""When the trainer's units were last heard, so that one that hangs can't hide behind the others' requests."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Liveness:
    """Whoever waits for an answer of ours is not silent, nor is a unit that has nothing left to do in the step."""

    def __init__(self) -> None:
        self._trainer = time.monotonic()
        self._answering = 0
        self._units: dict[int, float] = {}  # of those with something to do: when heard, infinite while they wait for us

    @contextmanager
    def answering(self, unit: int | None) -> Iterator[None]:
        """A request is a sign of life of the trainer, and of the unit that it comes from; one of no unit is asked by
        the first rank for all, who wait for its answer."""
        self._answering += 1
        self._hear(unit, math.inf)
        try:
            yield
        finally:
            self._answering -= 1
            self._trainer = time.monotonic()
            self._hear(unit, self._trainer)

    def _hear(self, unit: int | None, when: float) -> None:
        if unit is None:
            self._units = dict.fromkeys(self._units, when)
        elif unit in self._units:
            self._units[unit] = when

    def expect(self, units: int) -> None:
        """From now on each unit asks for groups, until `excuse`."""
        self._units = dict.fromkeys(range(units), time.monotonic())

    def excuse(self, unit: int) -> None:
        """The unit has been told that the step has no more groups; it waits for the others now."""
        self._units.pop(unit, None)

    def longer_than(self, seconds: float) -> str | None:
        """Who has been silent for longer than that: "the trainer", "unit 1 of the trainer", or nobody."""
        now = time.monotonic()
        if not self._answering and now - self._trainer > seconds:
            return "the trainer"
        return next(
            (f"unit {unit} of the trainer" for unit, heard in self._units.items() if now - heard > seconds), None
        )
