"""Columns whose bodies are stored outside the orchestrator: kept, found for a lease, and generated again if lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from msgspec.structs import replace

from engine.errors import ServiceConflict, StoreError
from engine.orchestrator.column_store import ColumnStore
from engine.wire.columns import GENERATED, Column, Row
from engine.wire.routes import ROUTES
from engine.wire.store_addresses import StoreAddresses
from engine.wire.store_client import StoreFault

RESTARTS = 3
"""Number of consecutive restarts that are allowed while the store returns no row and no row is trained."""

Again = Callable[[int, int], Awaitable[Row]]
"""(step, index) → the row, sampled again."""
At = tuple[int, int]
"""Step and index of a row."""
Columns = tuple[Column, ...]


class StoredColumns:
    """Keeps the columns of the stage `generate`, for the steps in progress, in the store. Scores, and what further
    stages write, stay in the table: they are small, or can't be generated again here.

    If a storage unit does not answer, the store is restarted. Rows that can still be read are put back. The others are
    generated again; those that are already trained, only on request. With rollout.deterministic, regenerated rows have
    the same bits as long as no weights change, as in modes "sync" and "periodic".
    """

    def __init__(self, store: ColumnStore, again: Again, tell: Callable[[str], None] = lambda text: None) -> None:
        """`tell` gets a line about each restart."""
        self._store = store
        self._again = again
        self._tell = tell
        self._kept: dict[At, Columns] = {}
        """The stored columns of rows, without their bodies."""
        self._trained: set[At] = set()
        self._lost: set[At] = set()
        """Trained rows that the store has lost."""
        self._over: dict[int, list[int]] = {}
        """By step that is over: indices of rows that are still in the store."""
        self._coming: dict[At, asyncio.Task[None]] = {}
        """Rows that are being generated again."""
        self._new: dict[At, Row] = {}
        """Regenerated rows: their columns that are not in the store."""
        self._restarting = asyncio.Lock()
        self._session = 0
        """Number of restarts so far."""
        self._in_vain = 0
        """Number of restarts since the store last returned a row, or a row was trained."""
        self.generated_again = 0
        """Number of rows that have been generated again so far."""

    async def keep_columns(self, row: Row) -> Row:
        """Store the columns of a row that belong in the store, and return the row without their bodies. First frees
        what steps that are over have in the store."""
        await self._free()
        columns = row.only((*GENERATED, ROUTES)).columns
        return row.with_columns(await self._put(row, columns)) if columns else row

    async def _put(self, row: Row, columns: Columns) -> Columns:
        at = (row.step, row.index)
        while True:
            session = await self._ready()
            try:
                await self._store.put_columns(*at, {column.name: column.body for column in columns})
            except StoreFault as fault:
                await self._restart(session, fault)
            if self._session == session:  # otherwise a restart may have missed the row
                self._kept[at] = tuple(Column(column.name, column.digest, b"") for column in columns)
                return self._kept[at]

    async def _ready(self) -> int:
        """Wait for a restart in progress to end. Return the session, which the next restart ends."""
        async with self._restarting:
            return self._session

    def where(self, rows: Iterable[Row]) -> StoreAddresses | None:
        """Return where the bodies of columns can be fetched now; None while the store restarts or lacks some of
        them."""
        away = self._coming.keys() | self._lost
        lacks = any((row.step, row.index) in away for row in rows)
        return None if lacks or self._restarting.locked() else self._store.addresses

    async def open(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of a lease with the bodies of their columns. Raises ServiceConflict if their step is over."""
        return list(await asyncio.gather(*(self._whole(row) for row in rows)))

    async def _whole(self, row: Row) -> Row:
        names = frozenset(column.name for column in row.columns if not column.body)
        if not names:
            return row
        fetched = await self._fetch((row.step, row.index), names)
        if (again := self._new.get((row.step, row.index))) is not None:
            row = replace(row, tokens=again.tokens, lengths=again.lengths).with_columns(again.only(row.names).columns)
        return row.with_columns(fetched)

    async def _fetch(self, at: At, names: frozenset[str]) -> list[Column]:
        while True:
            if at in self._lost:
                self._generate(at)
            if (coming := self._coming.get(at)) is not None:
                await asyncio.shield(coming)
                continue
            session = await self._ready()
            if at not in self._kept:
                raise ServiceConflict(f"step {at[0]} is over, and its group {at[1]} is gone")
            columns = [column for column in self._kept[at] if column.name in names]
            try:
                bodies = await self._store.get_columns(*at, [column.name for column in columns])
            except StoreFault as fault:
                await self._restart(session, fault)
                continue
            self._in_vain = 0
            found = [Column(column.name, column.digest, bodies[column.name]) for column in columns]
            if all(column.is_whole for column in found):
                return found
            self._generate(at)  # its bytes differ from what was packed

    def trained(self, step: int, indices: Iterable[int]) -> None:
        """Record that rows are trained: if they are lost, they are generated again only on request."""
        self._in_vain = 0
        self._trained.update((step, index) for index in indices)

    def forget_step(self, step: int) -> None:
        """Forget the columns of a step that is over."""
        rows = [at for at in self._kept if at[0] == step]
        if stored := [index for _, index in rows if (step, index) not in self._lost]:
            self._over[step] = stored
        for at in rows:
            del self._kept[at]
            self._new.pop(at, None)
        self._trained.difference_update(rows)
        self._lost.difference_update(rows)

    async def _free(self) -> None:
        while self._over:
            session = await self._ready()
            step, indices = self._over.popitem()
            try:
                await self._store.clear_rows(step, indices)
            except StoreFault as fault:
                await self._restart(session, fault)

    async def _restart(self, session: int, fault: StoreFault) -> None:
        """Restart the store, unless that has happened since `session`. Raises StoreError if restarting no longer
        helps."""
        async with self._restarting:
            if self._session != session:
                return
            if self._in_vain == RESTARTS:
                raise StoreError(f"TransferQueue was restarted {RESTARTS} times in a row, and still fails: {fault}")
            self._session += 1
            self._in_vain += 1
            away = self._coming.keys() | self._lost
            rows = {at: columns for at, columns in self._kept.items() if at not in away}
            found = await asyncio.gather(*(self._read(at, columns) for at, columns in rows.items()))
            await self._store.start_store()
            self._tell(
                f"TransferQueue was restarted, and has lost {found.count(None)} of {len(found)} groups; those that are "
                f"not trained yet are generated again: {fault}"
            )
            self._over = {}
            for at, bodies in zip(rows, found, strict=True):
                if bodies is not None:
                    await self._put_back(at, bodies)
                elif at in self._trained:
                    self._lost.add(at)
                elif at in self._kept:  # otherwise its step has ended
                    self._generate(at)

    async def _put_back(self, at: At, bodies: dict[str, bytes]) -> None:
        try:
            await self._store.put_columns(*at, bodies)
        except StoreFault as fault:
            raise StoreError(f"TransferQueue was restarted, but does not work: {fault}") from fault

    async def _read(self, at: At, columns: Columns) -> dict[str, bytes] | None:
        try:
            return await self._store.get_columns(*at, [column.name for column in columns])
        except StoreFault:
            return None

    def _generate(self, at: At) -> None:
        self._lost.discard(at)
        if at not in self._coming:
            self._coming[at] = asyncio.create_task(self._generate_again(at))

    async def _generate_again(self, at: At) -> None:
        try:
            row = await self._again(*at)
            self.generated_again += 1
            if at in self._kept:  # otherwise its step has ended
                await self.keep_columns(row)
                self._new[at] = row.only(row.names.difference((*GENERATED, ROUTES)))
        finally:
            del self._coming[at]

    async def close(self) -> None:
        """Stop generating, and close the store."""
        tasks = list(self._coming.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._store.close()
