"""A function call in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.errors import DeadlineError


class Background:
    """A call that begins at once in a thread of its own."""

    def __init__(self, act: Callable[[], None], late: str) -> None:
        """`late`: the message of the DeadlineError when the call does not end in time."""
        self._late = late
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(act,), name="weights", daemon=True)
        self._thread.start()

    def _run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised again in `result`
            self._error = error

    def wait(self, timeout_s: float) -> bool:
        """Wait for the call to end. Return whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self, timeout_s: float) -> None:
        """Wait for the call to end, and raise its error. Raises DeadlineError."""
        if not self.wait(timeout_s):
            raise DeadlineError(f"{self._late} within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
