"""A function call in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait

from engine.errors import DeadlineError
from engine.run.threads import in_thread


class Background:
    """A call that begins at once in a thread of its own."""

    def __init__(self, act: Callable[[], None], late: str) -> None:
        """`late`: the message of the DeadlineError when the call does not end in time."""
        self._late = late
        self._done = in_thread("weights", act)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the call to end. Return whether it has."""
        return bool(wait([self._done], timeout_s).done)

    def result(self, timeout_s: float) -> None:
        """Wait for the call to end, and raise its error. Raises DeadlineError."""
        if not self.wait(timeout_s):
            raise DeadlineError(f"{self._late} within {timeout_s:g} s")
        self._done.result()
