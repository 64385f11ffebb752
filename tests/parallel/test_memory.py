"""The dry run's parameters, gradients and optimizer states against what two real ranks hold."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from torch.distributed import TCPStore

pytestmark = pytest.mark.parallel
RANK = Path(__file__).with_name("memory_rank.py")
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
    model = tiny_models.save(tmp_path / kind, kind, vocab_size=64, hidden_size=64, intermediate_size=128,
                             tie_word_embeddings=kind == "llama")  # fmt: skip
    given = [f"model.path={model}", "train.ratio_gap_limit=0", "algorithm.old_policy=previous", *overrides]
    for rank, figures in enumerate(ranks(tmp_path, RANK, given)):
        for name, (real, computed) in figures.items():
            assert abs(real - computed) <= PADDING, f"rank {rank}: {name}"


def ranks(folder, script, overrides, *arguments):
    """What two ranks that run a script report; the store's port is free because it is ours."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reports = [folder / f"rank-{rank}.json" for rank in range(2)]
    started = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps(overrides), *map(str, arguments)], stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                 "REPORT": str(path)},
        )
        for rank, path in enumerate(reports)
    ]  # fmt: skip
    try:
        for process in started:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors[-2000:]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads(report.read_text()) for report in reports]
