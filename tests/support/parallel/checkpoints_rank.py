"""One rank of test_checkpoints.py: `python checkpoints_rank.py WHAT FOLDER PORT...`.

"first" does all layouts in the same processes, of which a layout takes the first few; then a checkpoint is begun over
which they are killed. "second" resumes what is left.
"""

import contextlib
import io
import json
import math
import os
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
PLAIN = {}
SHARED = {"train.distributed_optimizer": True}
TP2 = {"parallel.tensor": 2}
PP2 = {"parallel.pipeline": 2}
DP2 = {"parallel.data": 2}
EP2 = {"parallel.data": 2, "parallel.expert": 2}
CP2 = {"parallel.context": 2}
FOUR = TP2 | PP2
MOE = {"model.path": "moe"}
BF16 = {"train.dtype": "bfloat16"}
CASES = [
    ("tp2pp2-dp2", FOUR, DP2),
    ("tp2-dp2", TP2, DP2),
    ("tp2-pp2", TP2, PP2),
    ("dp2shared-tp2", DP2 | SHARED, TP2),
    ("dp2shared-tp2shared-bf16", DP2 | SHARED | BF16, TP2 | SHARED | BF16),
    ("dp2shared-cp2shared", DP2 | SHARED, CP2 | SHARED),
    ("ep2shared-dp2-moe", EP2 | SHARED | MOE, DP2 | MOE),
    ("pp2-one", PP2, PLAIN),
    ("one-dp2shared", PLAIN, DP2 | SHARED),
]
"""Name, layout that saves, layout that loads; each way there and back.
That of most ranks comes first, since others wait."""


def settings_of(folder, changes):
    return {
        "run.name": "run",
        "run.output": str(folder),
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 16,
        "rollout.max_context": 64,
        "train.learning_rate": 1e-3,
        "train.timeout_s": 60,
        "train.ratio_gap_limit": 0,
        "train.warmup_steps": 5,
        "algorithm.old_policy": "previous",
        "algorithm.kl_coef": 0.01,
        "algorithm.gradient_control": "gac",
        "algorithm.gac_low": 0.01,
        "algorithm.gac_high": 0.99,
        **changes,
        "model.path": str(folder / changes.get("model.path", "dense")),
    }


class Side:
    """A policy in one layout, with its checkpoints."""

    def __init__(self, folder, changes, root, policy=None):
        from engine import platform
        from engine.trainer.checkpoint.checkpoints import Checkpoints
        from engine.trainer.policy import Policy
        from support.runs import config_of

        config = config_of(settings_of(folder, changes))
        self.policy = policy or Policy(config, platform.get_platform("cpu"))
        self.root = folder / root
        self.checkpoints = Checkpoints(self.root, self.policy, config)

    def accumulate(self, seed):
        """The gradient of two groups, shared among the replicas."""
        from support.policies import a_group

        policy = self.policy
        policy.start_step()
        replica_groups = [[0, 1]] if policy.ranks.replica_groups == 1 else [[0], [1]]
        policy.accumulate(
            [a_group(seed=seed * 2 + index, index=index) for index in replica_groups[policy.ranks.replica_group]]
        )
        policy.reduce_gradients(8)

    def train(self, seed):
        """One step: (gradient norm, learning rate)."""
        self.accumulate(seed)
        self.policy.models.copy_policy_to_old()
        return self.policy.step_optimizer()

    def gradient(self, seed, file):
        """Hugging Face's tensors of the gradient, whole; not under the distributed optimizer, which scatters it."""
        from engine.model.hf_weights import export_weights

        self.accumulate(seed)
        model = self.policy.models.policy
        rank = self.policy.ranks.rank
        mine = export_weights(
            {name: p.main_grad for name, p in model.named_parameters()}, model, self.policy.models.shape
        )
        torch.save({name: tensor.clone() for name, tensor in mine}, f"{file}-{rank}.pt")
        self.policy.ranks.barrier()
        return whole(file)

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
            p.clone() for p in self.policy.models.old.weights
        ]


def whole(file):
    """What `Side.gradient` wrote, of all ranks: each has its stage's tensors."""
    parts = sorted(file.parent.glob(f"{file.name}-*.pt"))
    return {name: tensor for part in parts for name, tensor in torch.load(part).items()}


def world(changes):
    """Ranks of a layout."""
    return math.prod(changes.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline", "context", "data"))


@contextlib.contextmanager
def ranks(changes, ports):
    """A session of the layout's ranks; the other processes get False."""
    from engine import platform

    port = ports.pop(0)
    size = world(changes)
    if int(os.environ["RANK"]) >= size:
        yield False
        return
    os.environ |= {"MASTER_PORT": port, "WORLD_SIZE": str(size)}
    sizes = {key.partition(".")[2]: value for key, value in changes.items() if key.startswith("parallel")}
    sizes.pop("data", None)
    with platform.parallel_session(platform.get_platform("cpu"), 0, timeout_s=60.0, **sizes):
        yield True


def numbers(folder):
    """The tensors of a checkpoint by name, whole; of a vocabulary that was padded for its layout the true rows."""
    from megatron.core import dist_checkpointing

    vocabulary = json.loads((folder / "state.json").read_text())["model"]["vocabulary"]
    whole = dist_checkpointing.load_plain_tensors(str(folder))
    return {
        key: value[:vocabulary] if "word_embeddings" in key else value
        for key, value in whole.items()
        if not key.startswith("rng")
    }


def there_and_back(folder, name, one, other, ports):
    """Two steps in one layout, the third in both, the fourth back in the first."""
    rounding = 2e-2 if "train.dtype" in one else 1e-4 if "model.path" in one else 1e-5
    with ranks(one, ports) as mine:
        if mine:
            here(folder, name, one)
    with ranks(other, ports) as mine:
        if mine:
            there(folder, name, other, rounding)
    with ranks(one, ports) as mine:
        if mine:
            back = Side(folder, one, name)
            assert back.resume()[0] == 3
            assert back.train(4)[0] == pytest.approx(figures(folder, name)[1][0], rel=rounding)


def here(folder, name, changes):
    """Save after two steps; the next two are the same, bit for bit, when it is loaded again.
    What they were is written down."""
    side = Side(folder, changes, name)
    side.train(1), side.train(2)
    side.save(2)
    saved = side.tensors()
    norms = [side.train(3), side.train(4)]
    again = Side(folder, changes, name)
    assert again.resume() == (2, "")
    for ours, theirs in zip(again.tensors(), saved, strict=True):
        assert torch.equal(ours, theirs)
    next_gradient(folder, name, changes, "here")
    assert [again.train(3), again.train(4)] == norms
    for ours, theirs in zip(again.tensors(), side.tensors(), strict=True):
        assert torch.equal(ours, theirs)
    if side.policy.ranks.rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(norms))


def figures(folder, name):
    """(gradient norm, learning rate) of the third and the fourth step in the layout that saved."""
    return json.loads((folder / f"{name}.json").read_text())


def next_gradient(folder, name, changes, where):
    """The third step's whole gradient, by a policy without the distributed optimizer, which would scatter it."""
    judge = Side(folder, changes | {"train.distributed_optimizer": False}, name)
    assert judge.resume()[0] == 2
    return judge.gradient(3, folder / f"{name}-{where}")


def there(folder, name, changes, rounding):
    """Load in another layout, compare everything, save after the third step."""
    side = Side(folder, changes, name)
    step, said = side.resume()
    assert step == 2
    assert ("random streams of its ranks are not restored" in said) == (side.policy.ranks.rank == 0)
    first = numbers(folder / name / "step-000002")
    second = numbers(Side(folder, changes, f"{name}-copy", side.policy).save(2))
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]), f"{name}: {key}"
    gradient = whole(folder / f"{name}-here")
    found = next_gradient(folder, name, changes, "there")
    assert found.keys() == gradient.keys()
    for key, value in found.items():
        assert torch.norm(value - gradient[key]) <= rounding * torch.norm(gradient[key]), f"{name}: {key}"
    norm, rate = side.train(3)
    expected = figures(folder, name)[0]
    assert norm == pytest.approx(expected[0], rel=rounding)
    assert rate == expected[1]
    side.save(3)


def killed(folder, ports):
    """A complete checkpoint, then one that is being written, while training goes on, when all ranks are killed."""
    from engine.trainer.checkpoint.checkpoints import Snapshot

    with ranks(TP2, ports) as mine:
        if not mine:
            return
        side = Side(folder, TP2, "killed")
        side.train(1)
        side.save(1)
        side.train(2)
        if side.policy.ranks.rank == 1:  # rank 0 gets its part written, rank 1 half of it
            Snapshot.write_data = lambda self, *_: (
                (Path(self.path) / "__1_0.distcp").write_bytes(b"half"),
                time.sleep(600),
            )
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
            skipped = "checkpoint step-000002 is incomplete (no _SUCCESS.json), ignored"
            assert said == f"{skipped}\n"
            assert side.checkpoints.notices == (skipped,)
        side.train(2), side.train(3)
        for ours, theirs in zip(
            side.tensors(), torch.load(folder / f"expected-{side.policy.ranks.rank}.pt"), strict=True
        ):
            assert torch.equal(ours, theirs)
        side.save(3)
        assert sorted(path.name for path in side.root.iterdir()) == ["step-000001", "step-000003"]


def main():
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    torch.set_num_threads(1)
    what, folder, *ports = sys.argv[1:]
    if what == "first":
        for name, one, other in CASES:
            there_and_back(folder=Path(folder), name=name, one=one, other=other, ports=ports)
        killed(Path(folder), ports)
    else:
        resumed(Path(folder), ports)


if __name__ == "__main__":
    main()
