"""Whether the run goes on, and a way for the orchestrator's coroutines to wait until something changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from engine.errors import MetronomeError

T = TypeVar("T")

SIGN_OF_LIFE_S = 1.0
"""Seconds after which the orchestrator answers a waiting request, so that its sender knows that it is alive."""


class RunState:
    """State shared by the methods that answer requests: the failure, and a condition to wait on."""

    def __init__(self) -> None:
        self.failure: MetronomeError | None = None
        """The error that stops the run; None while the run goes on."""
        self._changed = asyncio.Condition()

    async def stop_run(self, error: MetronomeError) -> None:
        """Stop the run with `error`, unless another error has stopped it already.

        Stages and programs get the error as the reply to their next request.
        """
        self.failure = self.failure or error
        await self.notify()

    def check_failure(self) -> None:
        """Raise the error that stops the run, if any."""
        if self.failure is not None:
            raise self.failure

    async def notify(self) -> None:
        """Wake all waiting coroutines, because something has changed."""
        async with self._changed:
            self._changed.notify_all()

    async def wait_briefly(self, look: Callable[[], T | None]) -> T | None:
        """Call `look` now and after each change, and return what it finds; None after SIGN_OF_LIFE_S seconds.

        Raises the error that stops the run, if any.
        """
        deadline = time.monotonic() + SIGN_OF_LIFE_S
        async with self._changed:
            while (found := look()) is None:
                self.check_failure()
                try:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        await self._changed.wait()
                except TimeoutError:
                    break
        return found
