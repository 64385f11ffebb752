"""A circuit breaker: an instance that keeps failing is left alone for a while, then tried with one request."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT = 3
"""Consecutive faults that open it."""
FIRST_S = 1.0
"""How long it stays open the first time; each trial that fails doubles it."""
LONGEST_S = 60.0
"""It never stays open longer."""


class CircuitBreaker:
    """Closed: requests pass. Open: none does. After its time one trial request passes, whose success closes it."""

    STATES = ("closed", "open", "trial")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._faults = 0
        self._open_s = 0.0
        self._until = 0.0
        self._tried = False

    @property
    def state(self) -> str:
        """ "closed", "open", or "trial" (one request may pass, or is under way)."""
        if not self._open_s:
            return "closed"
        return "open" if self._clock() < self._until else "trial"

    @property
    def passes(self) -> bool:
        """Whether a request may be sent now."""
        return self.state == "closed" or (self.state == "trial" and not self._tried)

    @property
    def wait_s(self) -> float:
        """Until a trial may pass; 0 when it is not open."""
        return max(0.0, self._until - self._clock()) if self._open_s else 0.0

    def begin(self) -> bool:
        """A caller is about to send; whether it may send one request only (the trial)."""
        if self.state == "closed":
            return False
        self._tried = True
        return True

    def success(self) -> None:
        """A request was answered as it should be."""
        self._faults = 0
        self._open_s = 0.0
        self._tried = False

    def fault(self) -> None:
        """A request failed. What was sent before it opened may still fail: that is not held against it again."""
        self._faults += 1
        if self.state == "trial" and self._tried:
            self._open(min(2 * self._open_s, LONGEST_S))
        elif self.state == "closed" and self._faults >= LIMIT:
            self._open(FIRST_S)

    def give_back(self) -> None:
        """The trial was broken off without a verdict: another one may pass."""
        self._tried = False

    def _open(self, seconds: float) -> None:
        self._open_s = seconds
        self._until = self._clock() + seconds
        self._tried = False
