"""New weights in the engine of an instance: seen by every token, and refused without a trace when anything is wrong."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import BadInput
from engine.instance.embedded.engine import Conflict
from support.sent import BF16, Sent, engine_of
from support.tiny_models import save

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("a"))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("b"), seed=1)


@pytest.fixture
def engine(folder):
    return engine_of(folder)


def tensors_in(folder):
    return list(load_file(f"{folder}/model.safetensors").items())


def update(engine, folder, version):
    engine.pause(abort=True, done=lambda: None)
    engine.start_update()
    engine.update(tensors_in(folder))
    engine.finish_update(version)
    engine.resume()


@pytest.mark.parametrize("dtype", [BF16])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_an_updated_engine_samples_as_one_that_was_started_from_the_weights(tmp_path, kind, dtype):
    first, second = (save(tmp_path / name, kind, seed=seed) for seed, name in enumerate("ab"))
    sent, fresh = (Sent(engine_of(folder, dtype=dtype)) for folder in (first, second))
    sent.engine.pause(abort=True, done=lambda: None)
    sent.engine.start_update()
    sent.engine.update([(name, tensor.to(dtype)) for name, tensor in tensors_in(second)])
    sent.engine.finish_update(0)
    sent.engine.resume()
    for one in (sent, fresh):
        one.send(max_tokens=12)
    assert sent.finish() == fresh.finish()


def test_weights_that_overflow_are_reported_and_leave_no_trace(folder, tmp_path):
    sent = Sent(engine_of(folder))
    tensors = load_file(f"{folder}/model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"][:] = float("inf")
    (tmp_path / "bad").mkdir()
    save_file(tensors, tmp_path / "bad" / "model.safetensors")
    update(sent.engine, tmp_path / "bad", 1)
    for _ in range(4):
        sent.send()
    assert {result.finish_reason for result in sent.finish()} == {"error"}
    update(sent.engine, folder, 2)
    sent.send()
    assert sent.finish()[-1].finish_reason == "length"


def test_a_failure_after_new_weights_never_serves_them_under_the_old_version(engine, other_folder):
    engine.pause(abort=True, done=lambda: None)
    engine.start_update()
    engine.update(tensors_in(other_folder))
    engine.start_update()
    with pytest.raises(BadInput):
        engine.update([("nowhere", torch.zeros(1))])
    with pytest.raises(Conflict):
        engine.resume()
    with pytest.raises(Conflict, match="failed half-way"):
        Sent(engine).send()
    update(engine, other_folder, 3)
    assert engine.version == 3
    sent = Sent(engine)
    sent.send()
    assert sent.finish()[-1].version == 3


def test_requests_that_wait_while_an_update_fails_half_way_end(engine, other_folder):
    engine.pause(abort=True, done=lambda: None)
    engine.start_update()
    sent = Sent(engine)
    sent.send()
    engine.update(tensors_in(other_folder)[:3])
    assert not sent.results
    with pytest.raises(BadInput):
        engine.update([("nowhere", torch.zeros(1))])
    assert [result.finish_reason for result in sent.results.values()] == ["abort"]


def test_an_update_bucket_by_bucket_must_bring_every_parameter_exactly_once(engine, other_folder):
    tensors = tensors_in(other_folder)
    engine.pause(abort=True, done=lambda: None)
    engine.start_update()
    engine.update(tensors[:7])
    with pytest.raises(Conflict, match=r"\d+ tensor\(s\) missing"):
        engine.finish_update(1)
    engine.update(tensors[7:])
    engine.finish_update(1)
    engine.start_update()
    with pytest.raises(BadInput, match="was sent twice"):
        engine.update([*tensors, tensors[3]])
    engine.start_update()
    engine.update(tensors[:1])
    with pytest.raises(BadInput, match="was sent twice"):
        engine.update(tensors)
