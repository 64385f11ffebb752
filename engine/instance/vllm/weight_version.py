"""Which weight version the workers hold, asked so that a change under a request never goes unseen,
and seldom twice at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class WeightVersionReader:
    """Readings of the workers' weight version, shared among the requests that want one at the same time."""

    def __init__(self, read: Callable[[], Awaitable[int]]) -> None:
        """`read` asks the workers."""
        self._read = read
        self._running: asyncio.Task[int] | None = None
        self._next: asyncio.Task[int] | None = None
        self.known = 0
        """What they said last."""
        self._asked = False

    async def before(self) -> int:
        """For a request about to be sent: any earlier reading will do, as a change since then shows in `after`."""
        return self.known if self._asked else await self.after()

    async def after(self) -> int:
        """For a reply that is there: a reading that begins now or later.
        At most one runs and one waits, for everybody."""
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
