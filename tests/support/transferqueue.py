"""Runs whose columns lie in TransferQueue: their settings, and hooks into their orchestrator."""

import asyncio
from importlib.util import find_spec

import pytest

from engine.orchestrator.transferqueue import TransferQueueStore

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
    """Call `disturb` with the store before the first window of a step is given."""
    called = []
    found = TransferQueueStore.get_columns

    async def get_columns(store, rows):
        if rows[0].step == step and not called:
            called.append(store)
            await asyncio.to_thread(disturb, store)
        return await found(store, rows)

    monkeypatch.setattr(TransferQueueStore, "get_columns", get_columns)
