"""The dry run's parameters, gradients and optimizer states against what two real ranks hold."""

import pytest

from support import tiny_models
from support.parallel.two_ranks import ranks
from support.runs import ROOT

pytestmark = pytest.mark.parallel
RANK = ROOT / "tests/support/parallel/memory_rank.py"
PADDING = 4096
"""Bytes by which Megatron fills up the buffers that a distributed optimizer shares."""


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("qwen3", ["parallel.tensor=2", "parallel.sequence=true", "train.dtype=bfloat16"]),
        ("llama", ["parallel.pipeline=2", "train.dtype=bfloat16"]),
        ("qwen3_moe", ["parallel.data=2", "parallel.expert=2", "train.distributed_optimizer=true"]),
    ],
)
def test_two_ranks_hold_what_is_computed(kind, overrides, tmp_path):
    model = tiny_models.save(
        tmp_path / kind, kind, vocab_size=64, hidden_size=64, intermediate_size=128, tie_word_embeddings=kind == "llama"
    )
    given = [f"model.path={model}", "train.ratio_gap_limit=0", "algorithm.old_policy=previous", *overrides]
    for rank, figures in enumerate(ranks(tmp_path, RANK, given)):
        for name, (real, computed) in figures.items():
            assert abs(real - computed) <= PADDING, f"rank {rank}: {name}"
