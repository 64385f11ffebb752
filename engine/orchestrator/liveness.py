"""When each unit of the trainer was last heard from, so that requests of other units can't hide a unit that hangs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Liveness:
    """Keeps the time of the last sign of life of the trainer and of each unit.

    A unit is not silent while it waits for the orchestrator's reply, or when it has nothing left to do in the step.
    """

    def __init__(self) -> None:
        self._trainer = time.monotonic()
        self._answering = 0
        self._units: dict[int, float] = {}
        """By unit with work left in the step: when it was last heard from; infinite while it waits for a reply."""

    @contextmanager
    def answering(self, unit: int | None) -> Iterator[None]:
        """Enter this context while a request is answered. It is a sign of life of the trainer and of the unit that
        asks.

        `unit` None means that rank 0 asks for all units, and all of them wait for the reply.
        """
        self._answering += 1
        self._note_sign_of_life(unit, math.inf)
        try:
            yield
        finally:
            self._answering -= 1
            self._trainer = time.monotonic()
            self._note_sign_of_life(unit, self._trainer)

    def _note_sign_of_life(self, unit: int | None, when: float) -> None:
        if unit is None:
            self._units = dict.fromkeys(self._units, when)
        elif unit in self._units:
            self._units[unit] = when

    def expect(self, units: int) -> None:
        """Expect requests of each of the `units` units from now on, until `excuse`."""
        self._units = dict.fromkeys(range(units), time.monotonic())

    def excuse(self, unit: int) -> None:
        """Expect no more requests of a unit, which was told that the step has no more groups and waits for the other
        units."""
        self._units.pop(unit, None)

    def longer_than(self, seconds: float) -> str | None:
        """Return "the trainer" or "unit 1 of the trainer" if it has been silent for longer than `seconds`; else
        None."""
        now = time.monotonic()
        if not self._answering and now - self._trainer > seconds:
            return "the trainer"
        return next(
            (f"unit {unit} of the trainer" for unit, heard in self._units.items() if now - heard > seconds), None
        )
