import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save

from engine.errors import BadInput
from engine.rollout.server.model import RolloutModel
from engine.rollout.server.weights import load_weights


@pytest.fixture
def model(tmp_path):
    return RolloutModel(save(tmp_path / "old"), 16).hf


@pytest.fixture
def tensors(tmp_path):
    save(tmp_path / "new", seed=1)
    return load_file(tmp_path / "new" / "model.safetensors")


def written(tmp_path, tensors):
    save_file(tensors, tmp_path / "weights.safetensors")
    return str(tmp_path / "weights.safetensors")


def values(model):
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def test_every_parameter_is_replaced(tmp_path, model, tensors):
    before = values(model)
    load_weights(model, written(tmp_path, tensors))
    after = values(model)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(after[name], tensors[name]) for name in tensors if name in after)


def change(name, value):
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(("damage", "message"), [
    (lambda tensors: tensors.pop("model.norm.weight"), r"missing 1 tensor\(s\), the first model.norm.weight"),
    (change("model.extra", torch.zeros(1)), r"unknown 1 tensor\(s\), the first model.extra"),
    (change("model.norm.weight", torch.zeros(47)), r"model.norm.weight is torch.float32 \[47\], the model's is"),
    (change("model.norm.weight", torch.zeros(48, dtype=torch.bfloat16)), "is torch.bfloat16"),
])
def test_a_file_that_does_not_fit_changes_nothing(tmp_path, model, tensors, damage, message):
    before = values(model)
    damage(tensors)
    with pytest.raises(BadInput, match=message):
        load_weights(model, written(tmp_path, tensors))
    assert all(torch.equal(before[name], value) for name, value in values(model).items())


def test_a_cut_or_absent_file_changes_nothing(tmp_path, model, tensors):
    before = values(model)
    path = tmp_path / "cut.safetensors"
    whole = (tmp_path / "new" / "model.safetensors").read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(BadInput, match="not a whole safetensors file"):
        load_weights(model, str(path))
    with pytest.raises(BadInput, match="no such file"):
        load_weights(model, str(tmp_path / "absent"))
    assert all(torch.equal(before[name], value) for name, value in values(model).items())


def test_a_tied_head_may_stand_in_the_file_if_it_is_the_embedding(tmp_path):
    model = RolloutModel(save(tmp_path / "old", tie_word_embeddings=True), 16).hf
    save(tmp_path / "new", seed=1, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    load_weights(model, written(tmp_path, tensors))
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    load_weights(model, written(tmp_path, tensors))
    tensors["lm_head.weight"][0, 0] += 1
    with pytest.raises(BadInput, match="ties them"):
        load_weights(model, written(tmp_path, tensors))
