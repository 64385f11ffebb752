import dataclasses

import pytest

from engine.config import Parallel
from engine.errors import BadInput
from engine.model.shape import Experts, ModelShape, check_layout

DENSE = ModelShape(
    "Qwen3ForCausalLM",
    layers=6,
    hidden=48,
    heads=12,
    kv_heads=2,
    head_dim=16,
    intermediate=80,
    vocabulary=61,
    context=128,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
)
ONE_HEAD = dataclasses.replace(DENSE, kv_heads=1, intermediate=81)
EVERYWHERE = Experts(count=4, per_token=2, intermediate=32, normalised=True, layers=tuple(range(6)))
MIXTURE = dataclasses.replace(DENSE, architecture="Qwen3MoeForCausalLM", intermediate=7, experts=EVERYWHERE)
DENSE_FIRST = dataclasses.replace(MIXTURE, experts=dataclasses.replace(EVERYWHERE, layers=(1, 2, 3, 4, 5)))


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (DENSE, {}),
        (DENSE, {"tensor": 4, "pipeline": 3, "context": 5, "data": 7}),  # four ranks share two key-value heads
        (DENSE, {"tensor": 2, "sequence": True, "pipeline": 6}),
        (MIXTURE, {"expert": 4, "data": 4}),
        (MIXTURE, {"tensor": 2, "sequence": True}),  # no dense MLP of 7 features to be cut
    ],
)
def test_what_fits(shape, layout):
    check_layout(shape, Parallel(**layout))


@pytest.mark.parametrize(
    ("shape", "layout", "said"),
    [
        (DENSE, {"tensor": 5}, ["parallel.tensor = 5 does not divide its 12 attention heads"]),
        (
            DENSE,
            {"tensor": 3},
            ["tensor = 3 and its 2 key-value heads", "= 3 does not divide its MLPs' intermediate size 80"],
        ),
        (
            ONE_HEAD,
            {"tensor": 3},
            ["parallel.tensor = 3 does not divide the 224 rows of its query, key and value weights"],
        ),
        (DENSE, {"pipeline": 4}, ["parallel.pipeline = 4 does not divide its 6 layers"]),
        (DENSE, {"expert": 2, "data": 2}, ["parallel.expert = 2 shares experts, but the model has none"]),
        (MIXTURE, {"expert": 3, "data": 3}, ["parallel.expert = 3 does not divide its 4 experts"]),
        (MIXTURE, {"tensor": 2}, ["parallel.tensor = 2 on a model with experts needs parallel.sequence = true"]),
        (DENSE_FIRST, {"tensor": 2, "sequence": True}, ["= 2 does not divide its MLPs' intermediate size 7"]),
    ],
)
def test_every_broken_rule_is_named_with_its_numbers(shape, layout, said):
    with pytest.raises(BadInput, match=shape.architecture) as refused:
        check_layout(shape, Parallel(**layout))
    message = str(refused.value)
    assert all(text in message for text in said), message
    assert message.count(";") == len(said) - 1
