"""Weight updates of the embedded engine: over files and groups, staged while it generates,
and those that fail half-way."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import BadInput, TransferError
from engine.instance.embedded.backend import EmbeddedBackend, EngineThread
from engine.instance.embedded.engine import Conflict, Engine
from engine.instance.embedded.rollout_model import RolloutModel
from engine.instance.protocol import RequestLimits, Sampling
from engine.wire.weights import bucket_file
from engine.wire.weights.buckets import Buffers, pack_buckets
from engine.wire.weights.groups import Rendezvous
from support.tiny_models import save

PROMPT = (5, 9, 20, 33, 7)


@pytest.fixture
def folders(tmp_path):
    return [Path(save(tmp_path / name, seed=seed)) for seed, name in enumerate("ab")]


@pytest.fixture
async def served(folders):
    """A worker over an engine with the first folder's weights, and its updates."""
    torch.set_grad_enabled(False)
    engine = Engine(RolloutModel(str(folders[0]), 128), slots=2, max_context=128)
    worker = EngineThread(engine, asyncio.get_running_loop(), lambda: None)
    worker.start()
    updates = EmbeddedBackend(worker, RequestLimits(61, 128, frozenset()), str(folders[0]))
    yield worker, updates
    updates._receiver.close()
    worker.stop()
    torch.set_grad_enabled(True)


def buckets(folder, tmp_path, **fields):
    """update_infos of a folder's tensors in several bucket files, and the buckets."""
    found = []
    for bucket in pack_buckets(load_file(folder / "model.safetensors").items(), None, 40_000, Buffers(99, 1.0)):
        info = {
            "transport": "file",
            "version": 1,
            "stage": 0,
            "bucket": bucket.number,
            **bucket.wire(),
            "path": str(tmp_path / f"{bucket.number}.safetensors"),
            **fields,
        }
        bucket_file.write_bucket(Path(info["path"]), bucket)
        found.append((bucket, info))
    assert len(found) > 2
    return found


async def scores(worker):
    return (await worker.complete(PROMPT, Sampling(max_tokens=1), True)).prompt_logprobs


async def begin(worker, updates):
    await worker.pause(abort=True)
    await updates.start_update()


async def finish(worker, updates, version):
    await updates.finish_update(version)
    await worker.call(Engine.resume)


async def expected(folder):
    return RolloutModel(str(folder), 128).scored_prefill(list(PROMPT))[1]


async def test_staged_weights_come_while_it_generates_and_are_swapped_in(served, folders, tmp_path):
    worker, updates = served
    before = await scores(worker)
    running = asyncio.create_task(worker.complete(PROMPT, Sampling(max_tokens=100, seed=1)))
    async with asyncio.timeout(10):  # once it is admitted: a pause leaves those that wait where they are
        while not (await worker.call(Engine.load))["running"]:
            await asyncio.sleep(0)
    for _, info in buckets(folders[1], tmp_path, staged=True):
        await updates.update(info)
    assert await scores(worker) == before
    await worker.pause(abort=False)
    assert (await running).version == 0
    await updates.start_update()
    await updates.update({"transport": "staged", "version": 1})
    await finish(worker, updates, 1)
    assert await scores(worker) == pytest.approx(await expected(folders[1]), abs=1e-5)


async def sent(bucket, group, updates, info):
    transfer = group.broadcast(*bucket.pieces())
    await updates.update(info)
    await asyncio.to_thread(transfer.wait)


@pytest.fixture
async def group(served):
    _, updates = served
    meeting = Rendezvous("127.0.0.1", "gloo", 5.0)
    gathering = asyncio.create_task(asyncio.to_thread(meeting.gather, 2))
    await updates.connect(
        {
            "transport": "gloo",
            "generation": 1,
            "stages": [meeting.address],
            "rank": 1,
            "world_size": 2,
            "timeout_s": 5.0,
        }
    )
    made = await gathering
    yield made
    made.close()


async def test_broadcast_buckets_are_loaded(served, folders, tmp_path, group):
    worker, updates = served
    for version in (1, 2):
        await begin(worker, updates)
        for bucket, info in buckets(folders[1], tmp_path, transport="gloo"):
            await sent(bucket, group, updates, info)
        await finish(worker, updates, version)
    assert await scores(worker) == pytest.approx(await expected(folders[1]), abs=1e-5)


async def test_what_is_wrong_with_a_broadcast_bucket_fails_the_update_by_name(served, folders, tmp_path, group):
    worker, updates = served
    (first, one), (second, two), *_ = buckets(folders[1], tmp_path, transport="gloo")
    await begin(worker, updates)
    await sent(first, group, updates, one)
    second.tensors[0] = second.tensors[0].clone()
    second.pieces()[0][5] ^= 1
    await sent(second, group, updates, two)
    with pytest.raises(BadInput, match=rf"{two['names'][0]} … \S+ was corrupted in transit"):
        await updates.finish_update(1)
    with pytest.raises(Conflict, match="failed half-way"):  # the first bucket is in the model
        await scores(worker)
    with pytest.raises(Conflict, match="unfinished"):
        await worker.call(Engine.resume)
    await begin(worker, updates)
    for _, info in buckets(folders[1], tmp_path):
        await updates.update(info)
    await finish(worker, updates, 2)
    assert await scores(worker) == pytest.approx(await expected(folders[1]), abs=1e-5)


async def test_a_broadcast_bucket_that_is_refused_before_anything_was_loaded_leaves_the_old_weights(
    served, folders, tmp_path, group
):
    worker, updates = served
    before = await scores(worker)
    await begin(worker, updates)
    (bucket, info), *_ = buckets(folders[1], tmp_path, transport="gloo")
    await sent(bucket, group, updates, info | {"checksum": "0" * 32})
    with pytest.raises(BadInput, match="was corrupted in transit"):
        await updates.finish_update(1)
    await worker.call(Engine.resume)
    assert await scores(worker) == before


async def test_a_transfer_that_breaks_before_anything_was_loaded_leaves_the_old_weights(
    served, folders, tmp_path, group
):
    worker, updates = served
    before = await scores(worker)
    await begin(worker, updates)
    receiving = asyncio.create_task(updates.update(buckets(folders[1], tmp_path, transport="gloo")[0][1]))
    await asyncio.sleep(0.1)
    threading.Thread(target=updates._receiver.close).start()
    with pytest.raises(TransferError):
        await receiving
    with pytest.raises(Conflict, match="no new weights"):
        await updates.finish_update(1)
    await worker.call(Engine.resume)
    assert await scores(worker) == before


async def test_an_update_that_begins_again_waits_for_the_bucket_that_is_being_loaded(served, folders, tmp_path, group):
    """Else the tensors of that bucket would have come twice, or be loaded into the update after it."""
    worker, updates = served
    gate = threading.Event()
    fetch = updates._receiver.fetch

    def slowly(*arguments):
        verify = fetch(*arguments)
        return lambda: gate.wait(10) and verify()

    updates._receiver.fetch = slowly
    await begin(worker, updates)
    first, *_ = sent_buckets = buckets(folders[1], tmp_path, transport="gloo")
    await sent(first[0], group, updates, first[1])
    again = asyncio.create_task(updates.start_update())
    await asyncio.sleep(0.1)
    assert not again.done()
    gate.set()
    await again
    for bucket, info in sent_buckets:
        await sent(bucket, group, updates, info)
    await finish(worker, updates, 1)
    assert await scores(worker) == pytest.approx(await expected(folders[1]), abs=1e-5)
