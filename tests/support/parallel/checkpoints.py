"""The parent's side of the checkpoint tests: models, and the ranks as processes."""

import contextlib
import os
import signal
import subprocess
import time

import pytest
import torch
from torch.distributed import TCPStore

from support.parallel.two_ranks import rank_environment


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
def started(command, folder, sessions, count):
    """The ranks as processes, each with its output in a file of the folder; they meet in stores of ours, one for each
    session. The command's last arguments are the folder and the stores' ports.

    A port that is only looked up and left free again may be somebody else's by the time a rank listens on it.
    """
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(sessions)]
    processes = [
        subprocess.Popen(
            [*command, str(folder), *(str(store.port) for store in stores)],
            env=rank_environment(rank, count),
            stdout=(folder / f"{rank}.log").open("a"),
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


def run(command, folder, sessions, count, timeout_s):
    """Run ranks to their end."""
    with started(command, folder, sessions, count) as ranks:
        until(lambda: all(process.poll() == 0 for process in ranks), ranks, folder, timeout_s)
