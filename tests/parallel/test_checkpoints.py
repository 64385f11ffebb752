"""Checkpoints of two ranks: saved in one layout and loaded in another, and a kill -9 of all ranks while one is written.

The file is also what the ranks run (`python test_checkpoints.py CASES FOLDER PORT...`): all layouts in one pair of
processes, then a second pair that resumes what the first was killed over.
"""

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2
PLAIN, SHARED = {}, {"train.distributed_optimizer": True}
TP2, PP2, DP2 = {"parallel.tensor": 2}, {"parallel.pipeline": 2}, {"parallel.data": 2}
EP2 = {"parallel.data": 2, "parallel.expert": 2}
MOE, BF16 = {"model.path": "moe"}, {"train.dtype": "bfloat16"}
CASES = [
    ("tp2-dp2", TP2, DP2),
    ("tp2-pp2", TP2, PP2),
    ("dp2shared-tp2", DP2 | SHARED, TP2),
    ("dp2shared-tp2shared-bf16", DP2 | SHARED | BF16, TP2 | SHARED | BF16),
    ("ep2shared-dp2-moe", EP2 | SHARED | MOE, DP2 | MOE),
]
"""Name, layout that saves, layout that loads; each way there and back."""


def settings_of(folder, changes):
    return {
        "run.name": "run", "run.output": str(folder), "rollout.group_size": 4, "rollout.max_new_tokens": 16,
        "rollout.max_context": 64, "train.learning_rate": 1e-3, "train.timeout_s": 60, "train.ratio_gap_limit": 0,
        "train.warmup_steps": 5, "algorithm.old_policy": "previous", "algorithm.kl_coef": 0.01,
        "algorithm.gradient_control": "gac", "algorithm.gac_low": 0.01, "algorithm.gac_high": 0.99,
        **changes, "model.path": str(folder / changes.get("model.path", "dense")),
    }  # fmt: skip


class Side:
    """A policy in one layout, with its checkpoints."""

    def __init__(self, folder, changes, root, policy=None):
        from conftest import config_of

        from engine import platform
        from engine.trainer.checkpoint import Checkpoints
        from engine.trainer.policy import Policy

        config = config_of(settings_of(folder, changes))
        self.policy = policy or Policy(config, platform.get("cpu"))
        self.root = folder / root
        self.checkpoints = Checkpoints(self.root, self.policy, config, "hash")

    def accumulate(self, seed):
        """The gradient of two groups, shared among the replicas."""
        policy = self.policy
        policy.start_step()
        units = [[0, 1]] if policy.ranks.units == 1 else [[0], [1]]
        policy.accumulate([a_group(seed * 2 + index, index) for index in units[policy.ranks.unit]])
        policy.reduce(8)

    def train(self, seed):
        """One step: (gradient norm, learning rate)."""
        self.accumulate(seed)
        self.policy.models.copy_policy_to_old()
        return self.policy.update()

    def gradient(self, seed, file):
        """Hugging Face's tensors of the gradient, whole; not under the distributed optimizer, which scatters it."""
        from engine.model.weights import export

        self.accumulate(seed)
        model, rank = self.policy.models.policy, self.policy.ranks.rank
        mine = export({name: p.main_grad for name, p in model.named_parameters()}, model, self.policy.models.shape)
        torch.save({name: tensor.clone() for name, tensor in mine}, f"{file}-{rank}.pt")
        self.policy.ranks.barrier()
        return torch.load(f"{file}-0.pt") | torch.load(f"{file}-1.pt")

    def save(self, step, **figures):
        self.checkpoints.save(step, figures)
        self.checkpoints.finish(60)
        self.policy.ranks.barrier()
        return self.root / f"step-{step:06d}"

    def resume(self):
        """(step, what rank 0 printed)."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            step = self.checkpoints.resume()
        return step, said.getvalue()

    def tensors(self):
        return [p.detach().clone() for p in self.policy.models.policy.parameters()] + [
            p.clone() for p in self.policy.models.old.weights]


def a_group(seed, index):
    from engine.types import Group, Prompt, Response, Score

    draw = random.Random(seed)
    ids = [tuple(draw.randrange(256) for _ in range(length)) for length in (7, 3, 12, 5)]
    prompt = Prompt("p", "", "", tuple(draw.randrange(256) for _ in range(9)))
    responses = tuple(Response(i, (-5.0,) * len(i), ((0, 0),), (True,) * len(i), "stop", "", 0, "i") for i in ids)
    return Group(0, index, prompt, responses, tuple(Score(draw.random()) for _ in ids))


@contextlib.contextmanager
def ranks(changes, ports):
    from engine import platform

    os.environ["MASTER_PORT"] = ports.pop(0)
    sizes = {key.partition(".")[2]: value for key, value in changes.items() if key.startswith("parallel")}
    sizes.pop("data", None)
    with platform.session(platform.get("cpu"), 0, timeout_s=60.0, **sizes):
        yield


def numbers(folder):
    """The tensors of a checkpoint by name, whole; of a vocabulary that was padded for its layout the true rows."""
    from megatron.core import dist_checkpointing

    vocabulary = json.loads((folder / "state.json").read_text())["model"]["vocabulary"]
    whole = dist_checkpointing.load_plain_tensors(str(folder))
    return {key: value[:vocabulary] if "word_embeddings" in key else value
            for key, value in whole.items() if not key.startswith("rng")}  # fmt: skip


def there_and_back(folder, name, one, other, ports):
    """Two steps in one layout, the third in both, the fourth back in the first."""
    rounding = 2e-2 if "train.dtype" in one else 1e-4 if "model.path" in one else 1e-5
    with ranks(one, ports):
        here = Side(folder, one, name)
        here.train(1), here.train(2)
        first = numbers(here.save(2))
        saved = {rank: here.tensors() for rank in [here.policy.ranks.rank]}
        norms = [here.train(3), here.train(4)]
        again = Side(folder, one, name)
        assert again.resume() == (2, "")
        for ours, theirs in zip(again.tensors(), saved[here.policy.ranks.rank], strict=True):
            assert torch.equal(ours, theirs)
        judge = Side(folder, one | {"train.distributed_optimizer": False}, name)
        assert judge.resume()[0] == 2
        gradient = judge.gradient(3, folder / f"{name}-here")
        assert [again.train(3), again.train(4)] == norms
        for ours, theirs in zip(again.tensors(), here.tensors(), strict=True):
            assert torch.equal(ours, theirs)
    with ranks(other, ports):
        there = Side(folder, other, name)
        step, said = there.resume()
        assert step == 2
        assert ("random streams of its ranks are not restored" in said) == (there.policy.ranks.rank == 0)
        second = numbers(Side(folder, other, f"{name}-copy", there.policy).save(2))
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert torch.equal(value, second[key]), f"{name}: {key}"
        if "train.distributed_optimizer" not in other:
            for key, value in there.gradient(3, folder / f"{name}-there").items():
                assert torch.norm(value - gradient[key]) <= rounding * torch.norm(gradient[key]), f"{name}: {key}"
        norm, rate = there.train(3)
        assert norm == pytest.approx(norms[0][0], rel=rounding)
        assert rate == norms[0][1]
        there.save(3)
    with ranks(one, ports):
        back = Side(folder, one, name)
        assert back.resume()[0] == 3
        assert back.train(4)[0] == pytest.approx(norms[1][0], rel=rounding)


def models(folder):
    """Two random models whose vocabulary does not divide by two, as Hugging Face folders."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(
        vocab_size=261, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(folder / "dense")
    experts = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
    Qwen3MoeForCausalLM(experts).save_pretrained(folder / "moe")


def killed(folder, ports):
    """A complete checkpoint, then one that is being written, while training goes on, when all ranks are killed."""
    from engine.trainer.checkpoint_writer import Snapshot

    with ranks(TP2, ports):
        side = Side(folder, TP2, "killed")
        side.train(1)
        side.save(1)
        side.train(2)
        if side.policy.ranks.rank == 1:  # rank 0 gets its part written, rank 1 half of it
            Snapshot.write_data = lambda self, *_: ((Path(self.path) / "__1_0.distcp").write_bytes(b"half"), time.sleep(600))
        side.checkpoints.save(2)
        side.train(3)
        side.checkpoints.poll()
        torch.save(side.tensors(), folder / f"expected-{side.policy.ranks.rank}.pt")
        side.policy.ranks.barrier()
        (folder / f"writing-{side.policy.ranks.rank}").touch()
        time.sleep(600)


def resumed(folder, ports):
    with ranks(TP2, ports):
        side = Side(folder, TP2, "killed")
        step, said = side.resume()
        assert step == 1
        if side.policy.ranks.rank == 0:
            assert said == "checkpoint step-000002 is incomplete (no _SUCCESS.json), ignored\n"
        side.train(2), side.train(3)
        for ours, theirs in zip(side.tensors(), torch.load(folder / f"expected-{side.policy.ranks.rank}.pt"), strict=True):
            assert torch.equal(ours, theirs)
        side.save(3)
        assert sorted(path.name for path in side.root.iterdir()) == ["step-000001", "step-000003"]


def main():
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    torch.set_num_threads(1)
    what, folder, *ports = sys.argv[1:]
    if what == "first":
        for name, one, other in CASES:
            there_and_back(Path(folder), name, one, other, ports)
        killed(Path(folder), ports)
    resumed(Path(folder), ports)


@contextlib.contextmanager
def started(what, folder, sessions):
    """The ranks as processes, each with its output in a file of the folder; they meet in stores of ours, one for each session.

    A port that is only looked up and left free again may be somebody else's by the time a rank listens on it.
    """
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(sessions)]
    shared = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0",
              "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, what, str(folder), *(str(store.port) for store in stores)],
            env=os.environ | shared | {"RANK": str(rank)},
            stdout=(folder / f"{what}-{rank}.log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for rank in range(WORLD)
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
@pytest.mark.timeout(240)
def test_layouts_and_a_kill_while_writing(tmp_path):
    models(tmp_path)
    with started("first", tmp_path, 3 * len(CASES) + 1) as first:
        until(lambda: all((tmp_path / f"writing-{rank}").exists() for rank in range(WORLD)), first, tmp_path, 150)
    assert not (tmp_path / "killed/step-000002").exists()
    assert (tmp_path / "killed/.step-000002.partial/__0_0.distcp").stat().st_size > 100_000
    with started("second", tmp_path, 1) as second:
        until(lambda: all(process.poll() == 0 for process in second), second, tmp_path, 80)


if __name__ == "__main__":
    main()
