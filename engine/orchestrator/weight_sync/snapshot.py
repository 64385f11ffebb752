"""Has a late instance load a snapshot of the weights: from its files, or, where it does not see them, over a broadcast
group of this process and the instance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.client.publish.transports import Address, GroupTransport
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.weight_sync.update_calls import UpdateCalls
from engine.wire.rollout_messages import Connect, InitInfo
from engine.wire.sync_messages import BucketInfo
from engine.wire.weights.bucket_file import BucketFile, wire_of
from engine.wire.weights.buckets import Bucket

BACKEND = "gloo"
"""The backend of the group, also where devices get their weights by another: this process has none."""


async def load_files(calls: UpdateCalls, instance: Instance, version: int, files: Sequence[Path]) -> None:
    """Have an instance that sees the files of a snapshot load them."""
    for number, file in enumerate(files):
        tensors = await asyncio.to_thread(wire_of, file)
        info = BucketInfo(transport="file", version=version, stage=0, bucket=number, path=str(file), **tensors)
        await calls.update_weights(instance, info, info.title)


async def send_files(
    calls: UpdateCalls, instance: Instance, version: int, files: Sequence[Path], address: Address
) -> None:
    """Send an instance the files of a snapshot. It verifies the checksums that the trainer has computed. `address`:
    this machine's, where the instance meets it. Raises MetronomeError; no transfer is left behind."""
    during = f"weight version {version}"
    world = 1 + await calls.world_size(instance, during)
    group = GroupTransport(BACKEND, calls.timeout_s, torch.device("cpu"), address)
    try:
        place = await asyncio.to_thread(group.meet, False)
        info = InitInfo(
            transport=BACKEND,
            generation=0,
            stages=[place],
            world_size=world,
            rank=1,
            timeout_s=calls.timeout_s,
        )
        await _both(group, lambda: group.gather(world), calls.send_request(instance, Connect(info), during))
        for number, file in enumerate(files):
            bucket, tensors = await asyncio.to_thread(_read, file, number)
            update = BucketInfo(transport=BACKEND, version=version, stage=0, bucket=number, **tensors)
            sent = group.send(bucket)
            await _both(group, sent.wait, calls.update_weights(instance, update, update.title))
    finally:
        group.call_off()


def _read(file: Path, number: int) -> tuple[Bucket, dict[str, Any]]:
    """A bucket, and what its message says of it."""
    tensors = wire_of(file)
    stored = BucketFile(file)
    buffer = torch.empty(stored.nbytes, dtype=torch.uint8)
    specs = stored.specs()
    return Bucket(number, specs, stored.read_tensors(buffer, specs), buffer), tensors


async def _both(group: GroupTransport, work: Callable[[], None], call: Coroutine[Any, Any, Any]) -> None:
    """Do `work` in a thread while the instance is called. If the call fails, the work is cancelled."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await call
        await working
    except BaseException:
        group.call_off()
        await asyncio.gather(working, return_exceptions=True)
        raise
