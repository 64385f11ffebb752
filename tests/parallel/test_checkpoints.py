"""Checkpoints saved in one layout and loaded in another, of 1, 2 or 4 ranks, and a kill -9 of all while one is written.

What the ranks do is in checkpoints_rank.py.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.distributed import TCPStore

from support.parallel.checkpoints_rank import CASES, TP2, world
from support.runs import ROOT

RANK = ROOT / "tests/support/parallel/checkpoints_rank.py"


def models(folder):
    """Two random models whose vocabulary does not divide by two, as Hugging Face folders."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(
        vocab_size=261,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(folder / "dense")
    experts = Qwen3MoeConfig(
        **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    )
    Qwen3MoeForCausalLM(experts).save_pretrained(folder / "moe")


@contextlib.contextmanager
def started(what, folder, sessions, count):
    """The ranks as processes, each with its output in a file of the folder; they meet in stores of ours, one for each
    session.

    A port that is only looked up and left free again may be somebody else's by the time a rank listens on it.
    """
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(sessions)]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "LOCAL_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(RANK), what, str(folder), *(str(store.port) for store in stores)],
            env=os.environ | shared | {"RANK": str(rank)},
            stdout=(folder / f"{what}-{rank}.log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for rank in range(count)
    ]
    try:
        yield processes
    finally:
        kill(processes)


def until(done, processes, folder, timeout_s):
    """Wait for a condition; a rank that ends before it, or the deadline, fails with the ranks' output."""
    deadline = time.monotonic() + timeout_s
    while not done():
        ended = [process.poll() for process in processes]
        if any(ended) or time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
            pytest.fail(f"ranks ended with {ended} ({timeout_s} s allowed)\n{logs}")
        time.sleep(0.05)


def kill(processes):
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parallel
@pytest.mark.timeout(400)
def test_layouts_and_a_kill_while_writing(tmp_path):
    models(tmp_path)
    with started("first", tmp_path, 3 * len(CASES) + 1, max(world(one) for _, one, _ in CASES)) as first:
        until(lambda: all((tmp_path / f"writing-{rank}").exists() for rank in range(world(TP2))), first, tmp_path, 300)
    assert not (tmp_path / "killed/step-000002").exists()
    assert (tmp_path / "killed/.step-000002.partial/__0_0.distcp").stat().st_size > 100_000
    with started("second", tmp_path, 1, world(TP2)) as second:
        until(lambda: all(process.poll() == 0 for process in second), second, tmp_path, 80)
