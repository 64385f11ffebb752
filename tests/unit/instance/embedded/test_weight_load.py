import pytest
import torch
from safetensors.torch import load_file

from engine.errors import BadInput
from engine.instance.embedded.rollout_model import RolloutModel
from engine.instance.embedded.weight_load import WeightLoad
from support.tiny_models import save


@pytest.fixture
def model(tmp_path):
    return RolloutModel(save(tmp_path / "old"), 16).hf


@pytest.fixture
def tensors(tmp_path):
    save(tmp_path / "new", seed=1)
    return load_file(tmp_path / "new" / "model.safetensors")


def load(model, tensors, cast=False):
    """As two buckets."""
    pairs = list(tensors.items())
    update = WeightLoad(model)
    update.add_tensors(pairs[:5], cast)
    update.add_tensors(pairs[5:], cast)
    update.check_whole()


def values(model):
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def test_other_dtypes_are_cast_only_where_that_is_asked_for(model, tensors):
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    with pytest.raises(BadInput, match="is torch.bfloat16"):
        load(model, halves)
    load(model, halves, cast=True)
    assert all(torch.equal(value, halves[name].float()) for name, value in values(model).items())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.extra", torch.zeros(1), "unknown tensor model.extra"),
        ("model.norm.weight", torch.zeros(47), r"model.norm.weight is torch.float32 \[47\], the model's is"),
        ("model.norm.weight", torch.zeros(48, dtype=torch.bfloat16), "is torch.bfloat16"),
    ],
)
def test_a_bucket_that_does_not_fit_changes_nothing(model, tensors, name, value, message):
    before = values(model)
    update = WeightLoad(model)
    with pytest.raises(BadInput, match=message):
        update.add_tensors([*((known, tensor) for known, tensor in tensors.items() if known != name), (name, value)])
    assert not update.touched
    assert all(torch.equal(before[name], value) for name, value in values(model).items())


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_head_may_come_too_if_it_is_the_embedding(tmp_path, together, head_first):
    model = RolloutModel(save(tmp_path / "old", tie_word_embeddings=True), 16).hf
    save(tmp_path / "new", seed=1, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    load(model, tensors)
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])

    def with_head(head):
        pairs = (
            [("lm_head.weight", head), *tensors.items()] if head_first else [*tensors.items(), ("lm_head.weight", head)]
        )
        update = WeightLoad(model)
        for bucket in [pairs] if together else [[pair] for pair in pairs]:
            update.add_tensors(bucket)
        update.check_whole()

    with_head(tensors["model.embed_tokens.weight"].clone())
    other = tensors["model.embed_tokens.weight"].clone()
    other[0, 0] += 1
    with pytest.raises(BadInput, match="ties them"):
        with_head(other)
