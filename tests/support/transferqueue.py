"""Runs whose columns lie in TransferQueue: their settings, and hooks into their orchestrator."""

from importlib.util import find_spec

import pytest

from engine.orchestrator.column_store import TransferQueueStore
from engine.orchestrator.stored_columns import StoredColumns

MARKS = [
    pytest.mark.transferqueue,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("transfer_queue") is None,
        reason="TransferQueue is not installed here: make transferqueue-test builds an environment with it",
    ),
]
ELSEWHERE = {"queue.store": "transferqueue", "queue.unauthenticated": True}
EXACT = {
    "rollout.deterministic": True,
    "rollout.timeout_s": 300,
    "train.consume": "prompt_order",
    "train.micro_batch_tokens": 150,
    "train.timeout_s": 300,
}


def disturbed(monkeypatch, disturb, step=1):
    """Call `disturb` with the store before the first window of a step is given. Returns the list of those called."""
    called = []
    found = StoredColumns.where

    def where(stored, rows):
        if rows[0].step == step and not called:
            called.append(stored)
            disturb(stored._store)
        return found(stored, rows)

    monkeypatch.setattr(StoredColumns, "where", where)
    return called


def reads(monkeypatch):
    """The (step, index) of each row that the orchestrator reads from the store."""
    found = []
    get = TransferQueueStore.get

    async def counted(store, step, index, names):
        found.append((step, index))
        return await get(store, step, index, names)

    monkeypatch.setattr(TransferQueueStore, "get", counted)
    return found


def starts(monkeypatch):
    """Where the servers of each start of the store listen."""
    found = []
    start = TransferQueueStore.start

    async def noted(store):
        await start(store)
        found.append(store.addresses)

    monkeypatch.setattr(TransferQueueStore, "start", noted)
    return found
