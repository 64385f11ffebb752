"""What two real ranks hold of each other's weights while they publish: some buckets, never the whole model."""

import pytest
from safetensors.torch import load_file

from engine.run.memory import BUCKETS
from support import tiny_models
from support.parallel.two_ranks import ranks
from support.runs import ROOT

pytestmark = pytest.mark.parallel
RANK = ROOT / "tests/support/parallel/export_rank.py"
BUCKET = 70_000
"""Bytes: a few of the model's tensors, which have up to 64 KiB."""


def test_no_rank_holds_more_of_the_gathered_weights_than_the_buckets_under_way_and_one_parameter(tmp_path):
    model = tiny_models.save(
        tmp_path / "model",
        vocab_size=64,
        hidden_size=64,
        head_dim=16,
        intermediate_size=256,
        num_hidden_layers=12,
        tie_word_embeddings=True,
    )
    sizes = [tensor.numel() * 4 for tensor in load_file(f"{model}/model.safetensors").values()]
    parameter = 2 * max(sizes)  # gate and up are gathered as one
    sender, other = ranks(tmp_path, RANK, [f"model.path={model}", "parallel.tensor=2"], tmp_path, BUCKET)
    assert sender["equal"]
    assert sender["buckets"] > 30
    assert sender["total"] == other["total"] > 0.9 * sum(sizes)
    assert BUCKET < sender["peak"] <= BUCKETS * BUCKET + parameter < 0.2 * sum(sizes)
    assert other["peak"] <= 2 * parameter
