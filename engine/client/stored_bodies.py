"""The bodies of a leased window's columns when they are stored outside the orchestrator: a unit's leader fetches
them."""

from __future__ import annotations

import asyncio

import torch
from msgspec.structs import replace

from engine.wire.columns import Column, Row
from engine.wire.messages import Window
from engine.wire.store_addresses import StoreAddresses
from engine.wire.store_client import StoreClient, StoreFault

BRIEFLY_S = 1.0
"""Seconds after which the leader gives a sign of life to the orchestrator and to the ranks of its unit."""


class StoredBodies:
    """Fetches the bodies of one window at a time, with one client for each start of the store."""

    def __init__(self, name: str, limit_s: float) -> None:
        """`name`: name of this rank. `limit_s`: seconds that a call to the store may take (queue.timeout_s)."""
        self._name = name
        self._limit_s = limit_s
        self._runner = asyncio.Runner()
        self._client: StoreClient | None = None
        self._store: StoreAddresses | None = None
        """The store that the client uses, or the one that could not be reached."""
        self._fetching: asyncio.Task[Window] | None = None
        self.lease: int | None = None
        """Number of the lease whose bodies are being fetched; None if there is none."""

    def begin(self, window: Window) -> None:
        """Begin to fetch the bodies of a window."""
        self.lease = window.lease
        self._fetching = self._runner.get_loop().create_task(self._fetch(window))

    def wait_briefly(self) -> Window | None:
        """Return the window with its bodies, or None if they have not arrived after BRIEFLY_S.

        Raises StoreFault if a body can't be fetched, or differs from what was packed.
        """
        assert self._fetching is not None
        done, _ = self._runner.run(asyncio.wait({self._fetching}, timeout=BRIEFLY_S))
        if not done:
            return None
        self.lease = None
        return self._fetching.result()

    async def _fetch(self, window: Window) -> Window:
        client = await self._client_of(window.store)
        threads = torch.get_num_threads()
        fetching = [asyncio.create_task(_whole(client, row)) for row in window.rows]
        await asyncio.gather(*fetching, return_exceptions=True)  # waits for all, even if one has failed
        torch.set_num_threads(threads)  # overlapping calls of TransferQueue change this number
        return replace(window, rows=tuple(one.result() for one in fetching), store=None)

    async def _client_of(self, store: StoreAddresses | None) -> StoreClient:
        """Return the client of a store. Raises StoreFault, at once if this store could not be reached before."""
        assert store is not None
        if self._store != store:
            if self._client is not None:
                self._client.close()
                self._client = None
            self._store = store
            self._client = await StoreClient.connect(store, self._name, self._limit_s)
        if self._client is None:
            raise StoreFault("TransferQueue could not be reached from this node before")
        return self._client

    def close(self) -> None:
        """Close the client and its event loop."""
        self._runner.close()
        if self._client is not None:
            self._client.close()


async def _whole(client: StoreClient, row: Row) -> Row:
    elsewhere = [column for column in row.columns if not column.body]
    bodies = await client.get(row.step, row.index, [column.name for column in elsewhere])
    fetched = [Column(column.name, column.digest, bodies[column.name]) for column in elsewhere]
    for column in fetched:
        if not column.is_whole:
            raise StoreFault(
                f"the bytes of column {column.name!r} of group {row.index}, step {row.step}, differ from those that "
                "were packed"
            )
    return row.with_columns(fetched)
