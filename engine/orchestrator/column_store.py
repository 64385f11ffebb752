"""Where the bodies of columns lie between the last response and the lease: `ColumnStore`.

The table tracks which rows are leased and trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from engine.config import Config
from engine.wire.columns import Row


class ColumnStore(Protocol):
    """Keeps the bodies of columns until their step is over. A method raises StoreError, which names the part of the
    store, if the store does not answer or has lost what is requested."""

    async def put_columns(self, row: Row) -> Row:
        """Store the columns of a row that belong in the store. Return the row as the table keeps it."""

    async def get_columns(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows of the table with the bodies of their columns."""

    def clear_step(self, step: int) -> None:
        """Forget the rows of a step that is over, now or with the next row that is put."""


class MemoryStore:
    """The orchestrator's memory: the bodies stay in the table's rows."""

    async def put_columns(self, row: Row) -> Row:
        """Return the row."""
        return row

    async def get_columns(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows."""
        return list(rows)

    def clear_step(self, step: int) -> None:
        """Do nothing: the table forgets its rows."""


@asynccontextmanager
async def starting_store(config: Config, folder: Path) -> AsyncIterator[asyncio.Task[ColumnStore]]:
    """Start the store that `queue.store` names in the background, and close it when the `async with` body ends.
    `folder`: the run folder, for its log."""
    if config.queue.store == "orchestrator":
        yield asyncio.create_task(asyncio.to_thread(MemoryStore))
        return
    from engine.orchestrator.transferqueue import TransferQueueStore

    store = TransferQueueStore(config, folder)

    async def start() -> ColumnStore:
        await store.start()
        return store

    starting = asyncio.create_task(start())
    try:
        yield starting
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await store.close()
