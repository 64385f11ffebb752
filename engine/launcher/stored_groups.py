"""Groups whose bodies lie outside the launcher: kept, found for a lease, and generated again when they are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from msgspec.structs import replace

from engine.errors import StoreError
from engine.launcher.group_store import TransferQueueStore
from engine.wire.sealed import SealedGroup, is_whole
from engine.wire.store_addresses import StoreAddresses
from engine.wire.store_client import StoreFault

RESTARTS = 3
"""Restarts in a row without a group between them that the store has returned, or that was trained."""

Again = Callable[[int, int], Awaitable[SealedGroup]]
"""(step, index) → the group, sampled again with the same seeds."""


class StoredGroups:
    """Every group that was put and is not trained is in the store, or on its way there again.

    Where a storage unit does not answer, TransferQueue is started again: the rows that can still be read are put back,
    the others are generated again. While no weights move, as in modes "sync" and "periodic", and with
    rollout.deterministic, they have the same bits.
    """

    def __init__(self, store: TransferQueueStore, again: Again) -> None:
        self._store = store
        self._again = again
        self._kept: dict[tuple[int, int], SealedGroup] = {}
        """By (step, index): the groups that are not trained, without their bodies."""
        self._trained: dict[int, list[int]] = {}
        """By step: trained groups that are in the store still."""
        self._coming: dict[tuple[int, int], asyncio.Task[None]] = {}
        """Groups that are being generated again."""
        self._restarting = asyncio.Lock()
        self._session = 0
        """Number of restarts so far."""
        self._in_vain = 0
        """Number of restarts since the store returned a group, or one was trained."""
        self.generated_again = 0
        """Number of groups so far."""

    async def put(self, group: SealedGroup) -> SealedGroup:
        """Keep a group, and return it without its body."""
        while True:
            session = await self._ready()
            try:
                await self._store.put(group.step, group.index, group.body)
            except StoreFault as fault:
                await self._restart(session, fault)
            if self._session == session:  # else a restart may not have seen the row
                kept = replace(group, body=b"")
                self._kept[group.step, group.index] = kept
                return kept

    async def _ready(self) -> int:
        """Wait for the end of a restart. Return the session, which ends with the next one."""
        async with self._restarting:
            return self._session

    def where(self, groups: Iterable[SealedGroup]) -> StoreAddresses | None:
        """Where the bodies of groups can be fetched now; None while the store is started again or lacks some."""
        lacks = any((group.step, group.index) in self._coming for group in groups)
        return None if lacks or self._restarting.locked() else self._store.addresses

    async def open(self, groups: Sequence[SealedGroup]) -> list[SealedGroup]:
        """Return groups of a lease with their bodies."""
        return list(await asyncio.gather(*(self._whole(group) for group in groups)))

    async def _whole(self, group: SealedGroup) -> SealedGroup:
        key = (group.step, group.index)
        while True:
            if (coming := self._coming.get(key)) is not None:
                await asyncio.shield(coming)
                continue
            session = await self._ready()
            try:
                body = await self._store.get(*key)
            except StoreFault as fault:
                await self._restart(session, fault)
                continue
            self._in_vain = 0
            found = replace(self._kept[key], body=body, mini_batch=group.mini_batch)
            if is_whole(found):
                return found
            self._generate(key)  # its bytes are not those that were sealed

    def trained(self, groups: Iterable[SealedGroup]) -> None:
        """Groups are trained, and not needed any more."""
        for group in groups:
            self._in_vain = 0
            del self._kept[group.step, group.index]
            self._trained.setdefault(group.step, []).append(group.index)

    async def clear(self, step: int) -> None:
        """Free the memory of a step that is trained."""
        while indices := self._trained.get(step):
            session = await self._ready()
            try:
                await self._store.clear(step, indices)
            except StoreFault as fault:
                await self._restart(session, fault)
            else:
                del self._trained[step]

    async def _restart(self, session: int, fault: StoreFault) -> None:
        """Start the store again, unless that was done since `session`. Raises StoreError if that helps no more."""
        async with self._restarting:
            if self._session != session:
                return
            if self._in_vain == RESTARTS:
                raise StoreError(f"TransferQueue was started again {RESTARTS} times in a row, and still: {fault}")
            self._session += 1
            self._in_vain += 1
            keys = [key for key in self._kept if key not in self._coming]
            bodies = await asyncio.gather(*(self._read(*key) for key in keys))
            await self._store.start()
            self._trained = {}
            for key, body in zip(keys, bodies, strict=True):
                if body is None:
                    self._generate(key)
                else:
                    try:
                        await self._store.put(*key, body)
                    except StoreFault as next_fault:
                        raise StoreError(
                            f"TransferQueue was started again, and does not work: {next_fault}"
                        ) from next_fault

    async def _read(self, step: int, index: int) -> bytes | None:
        try:
            return await self._store.get(step, index)
        except StoreFault:
            return None

    def _generate(self, key: tuple[int, int]) -> None:
        if key not in self._coming:
            self._coming[key] = asyncio.create_task(self._generate_again(key))

    async def _generate_again(self, key: tuple[int, int]) -> None:
        try:
            group = await self._again(*key)
            self.generated_again += 1
            await self.put(group)
        finally:
            del self._coming[key]

    async def close(self) -> None:
        """Stop generating, and end the store."""
        tasks = list(self._coming.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._store.close()
