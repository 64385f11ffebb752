"""Readings of the workers' weight version. They show every change during a request, and few run at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class WeightVersionReader:
    """Readings of the workers' weight version, shared among the requests that want one at the same time."""

    def __init__(self, read: Callable[[], Awaitable[int]]) -> None:
        """`read` asks the workers for their version."""
        self._read = read
        self._running: asyncio.Task[int] | None = None
        self._next: asyncio.Task[int] | None = None
        self.known = 0
        """The version that the workers gave last."""
        self._asked = False

    async def before(self) -> int:
        """Return a version for a request about to be sent. An earlier reading will do: `after` shows a change since."""
        return self.known if self._asked else await self.after()

    async def after(self) -> int:
        """Return the version for a reply that has come, from a reading that begins now or later.

        Requests share readings: at most one runs and one waits.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._take_turn(self._running))
        return await asyncio.shield(self._next)

    async def _take_turn(self, previous: asyncio.Task[int] | None) -> int:
        if previous is not None:
            await asyncio.wait([previous])
        self._running = self._next
        self._next = None
        self.known = await self._read()
        self._asked = True
        return self.known
