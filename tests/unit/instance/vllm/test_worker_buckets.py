"""Broadcast buckets in a worker of vLLM: a real receiver and group, with stand-ins for vLLM's model and reload."""

import contextlib
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from engine.instance.receiver import Receiver
from engine.instance.vllm.worker_extension import WorkerExtension
from engine.wire.weights.buckets import Buffers, pack_buckets
from engine.wire.weights.groups import Rendezvous

PATIENCE_S = 10.0
TENSORS = {name: torch.randn(40, 5) for name in "abcd"}


class Model(nn.Module):
    """Keeps what is loaded. `on_load` is called before each bucket."""

    def __init__(self):
        super().__init__()
        self.held = {}
        self.on_load = lambda: None

    def load_weights(self, tensors):
        self.on_load()
        self.held |= {name: tensor.clone() for name, tensor in tensors}


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """In an update, with the sender's group."""
    config = types.ModuleType("vllm.config")
    config.set_current_vllm_config = lambda config: contextlib.nullcontext()
    reload = types.ModuleType("vllm.model_executor.model_loader.reload")
    reload.layerwise = types.SimpleNamespace(
        initialize_layerwise_reload=lambda model: None,
        finalize_layerwise_reload=lambda model, config: None,
        get_layerwise_info=lambda layer: types.SimpleNamespace(loaded_weights=[]),
    )
    monkeypatch.setitem(sys.modules, config.__name__, config)
    monkeypatch.setitem(sys.modules, reload.__name__, reload)
    save_file(TENSORS, tmp_path / "model.safetensors")
    made = WorkerExtension()
    made.rank = 0
    made.device = torch.device("cpu")
    text = types.SimpleNamespace(tie_word_embeddings=False)
    made.model_config = types.SimpleNamespace(model=tmp_path, hf_text_config=text)
    made.vllm_config = types.SimpleNamespace(model_config=made.model_config)
    model = made.model = Model()
    made.model_runner = types.SimpleNamespace(get_model=lambda: model)
    meeting = Rendezvous("127.0.0.1", "gloo", PATIENCE_S)
    init = {"transport": "gloo", "stages": [meeting.address], "rank": 1, "world_size": 2, "timeout_s": PATIENCE_S}
    with ThreadPoolExecutor(1) as threads:
        sender = threads.submit(meeting.gather, 2)
        made.metronome("start")
        run(made, 0, connect=init)
        made.group = sender.result(PATIENCE_S)
        yield made
    made.group.close()
    made.metronome("close")


def run(worker, number, **job):
    """Begin a job and wait for it; the number of polls."""
    answer = worker.metronome("begin", {"number": number, **job})
    polls = 0
    while answer.get("result") is False:
        answer = worker.metronome("poll", number)
        polls += 1
    if "error" in answer:
        raise ValueError(answer["error"])
    return polls


def wires():
    """Four buckets of a tensor each, and their update_infos."""
    for bucket in pack_buckets(TENSORS.items(), None, 1000, Buffers(4, 1.0)):
        yield bucket, {"transport": "gloo", "version": 1, "stage": 0, "bucket": bucket.number, **bucket.wire()}


def test_a_bucket_is_loaded_while_the_next_one_arrives_and_none_is_polled_for(worker, monkeypatch):
    fetched = threading.Semaphore(0)
    fetch = Receiver.fetch

    def counted(*arguments):
        found = fetch(*arguments)
        fetched.release()
        return found

    monkeypatch.setattr(Receiver, "fetch", counted)

    def wait_for_next():
        last = len(worker.model.held) == len(TENSORS) - 1  # `finish` loads it
        assert last or fetched.acquire(timeout=PATIENCE_S)

    worker.model.on_load = wait_for_next
    for bucket, info in wires():
        if bucket.number == 0:
            late = threading.Timer(0.05, worker.group.broadcast, bucket.pieces())
            late.start()
            assert run(worker, 1, receive=info) == 0
            assert fetched.acquire(timeout=0)  # its own
        else:
            worker.group.broadcast(*bucket.pieces())
            assert run(worker, 1 + bucket.number, receive=info) == 0
        assert len(worker.model.held) == bucket.number

    assert worker.metronome("finish", 1) == {"result": None}
    assert all(torch.equal(worker.model.held[name], tensor) for name, tensor in TENSORS.items())
    assert worker.metronome("state")["result"] == {"weight_version": 1, "damaged": False, "updating": False}


@pytest.mark.parametrize("damaged", [0, 1, 3])
def test_a_flipped_bit_is_refused_and_nothing_of_its_bucket_is_loaded(worker, damaged):
    """By the next bucket, or by `finish`."""
    name = list(TENSORS)[damaged]
    refused = f"the bucket {name} … {name} was corrupted in transit"
    for bucket, info in wires():
        if bucket.number == damaged:
            bucket.tensors[0] = bucket.tensors[0].clone()
            bucket.pieces()[0][7] ^= 4
        worker.group.broadcast(*bucket.pieces())
        if bucket.number == damaged + 1:
            with pytest.raises(ValueError, match=refused):
                run(worker, 1 + bucket.number, receive=info)
            break
        run(worker, 1 + bucket.number, receive=info)
    else:
        assert refused in worker.metronome("finish", 1)["error"]
    worker.metronome("abort")
    assert list(worker.model.held) == list(TENSORS)[:damaged]
    assert worker.metronome("state")["result"] == {"weight_version": 0, "damaged": damaged > 0, "updating": False}
    assert "no weights were loaded" in worker.metronome("finish", 1)["error"]
