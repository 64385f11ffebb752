"""Whether the run goes on, and waiting in the launcher until something changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from engine.errors import MetronomeError

T = TypeVar("T")

SIGN_OF_LIFE_S = 1.0
"""A rank that waits for a group hears from the launcher this often."""


class RunState:
    """Shared by the methods that answer the trainer."""

    def __init__(self) -> None:
        self.failure: MetronomeError | None = None
        """Why the run stops."""
        self._changed = asyncio.Condition()

    async def fail(self, error: MetronomeError) -> None:
        """Stop the run, unless it stops already: the trainer hears of it with its next request."""
        self.failure = self.failure or error
        await self.notify()

    def check(self) -> None:
        """Raise what stops the run."""
        if self.failure is not None:
            raise self.failure

    async def notify(self) -> None:
        """Something has changed: wake all that wait for it."""
        async with self._changed:
            self._changed.notify_all()

    async def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait, without a deadline of its own: the caller cancels it with the run."""
        async with self._changed:
            await self._changed.wait_for(reached)

    async def wait_briefly(self, look: Callable[[], T | None]) -> T | None:
        """What `look` finds, tried again whenever something changes; None when it is time for a sign of life."""
        deadline = time.monotonic() + SIGN_OF_LIFE_S
        async with self._changed:
            while (found := look()) is None:
                self.check()
                try:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        await self._changed.wait()
                except TimeoutError:
                    break
        return found
