"""A call in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.errors import DeadlineError


class Background:
    """Begins at once."""

    def __init__(self, act: Callable[[], None], late: str) -> None:
        """`late`: what it means when it does not end in time."""
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
        """Whether it has ended in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self, timeout_s: float) -> None:
        """Wait for its end; raises its error."""
        if not self.wait(timeout_s):
            raise DeadlineError(f"{self._late} within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
