"""A circuit breaker: an instance that keeps failing gets no requests for a while, and then a single trial request."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT = 3
"""Number of consecutive failures that open the breaker."""
FIRST_S = 1.0
"""Seconds that the breaker stays open the first time. Each failed trial doubles them."""
LONGEST_S = 60.0
"""The longest time in seconds that the breaker stays open."""


class CircuitBreaker:
    """Closed: requests pass. Open: no request passes. After a time, one trial request passes, and its success closes
    it."""

    STATES = ("closed", "open", "trial")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._faults = 0
        self._open_s = 0.0
        self._until = 0.0
        self._tried = False

    @property
    def state(self) -> str:
        """The state: "closed", "open", or "trial" (one request may pass, or is in progress)."""
        if not self._open_s:
            return "closed"
        return "open" if self._clock() < self._until else "trial"

    @property
    def passes(self) -> bool:
        """Whether a request may be sent now."""
        return self.state == "closed" or (self.state == "trial" and not self._tried)

    @property
    def wait_s(self) -> float:
        """Seconds until a trial may pass; 0 if the breaker is not open."""
        return max(0.0, self._until - self._clock()) if self._open_s else 0.0

    def begin_request(self) -> bool:
        """Record that a caller is about to send. Return whether it may send only one request (the trial)."""
        if self.state == "closed":
            return False
        self._tried = True
        return True

    def record_success(self) -> None:
        """Record that a request was answered correctly."""
        self._faults = 0
        self._open_s = 0.0
        self._tried = False

    def record_fault(self) -> None:
        """Record that a request failed. Requests sent before the breaker opened may still fail; these do not count
        again."""
        self._faults += 1
        if self.state == "trial" and self._tried:
            self._open(min(2 * self._open_s, LONGEST_S))
        elif self.state == "closed" and self._faults >= LIMIT:
            self._open(FIRST_S)

    def give_back(self) -> None:
        """Allow another trial, because the current one was interrupted without a result."""
        self._tried = False

    def _open(self, seconds: float) -> None:
        self._open_s = seconds
        self._until = self._clock() + seconds
        self._tried = False
