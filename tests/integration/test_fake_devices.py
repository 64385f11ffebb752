"""Weight syncs with the weights on a device that is not there: no tensor on the wrong device, no thread that sends from
another one than its own."""

import json
import os
import subprocess
import sys

import pytest

from support.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SENT = {"1": 3, "2": 6, "18": 6, "420": 6, "512": 6, "10000": 6}
"""Calls of a broadcast by the bytes of the piece: a byte to connect, and the tensors of two versions, each by the
sender and by two receivers."""


def synced(*arguments, careless=""):
    """`fake_weight_sync.py` in a process of its own, after the statements `careless`."""
    code = f"import fake_weight_sync\n{careless}\nfake_weight_sync.run()"
    paths = [ROOT, ROOT / "tests", ROOT / "tests/support"]
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )


@pytest.mark.parametrize(
    ("device", "transports"),
    [("cuda:1", ("nccl", "nccl+staged", "gloo", "file")), ("npu:0", ("hccl", "hccl+staged"))],
)
def test_the_weights_arrive(device, transports):
    done = synced(device, *transports)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for transport, found in zip(transports, lines, strict=True):
        between_devices = transport in ("nccl", "hccl")  # staged weights and the others are received in host memory
        assert found["versions"] == [2, 2]
        assert found["received_on"] == [device if between_devices else "cpu"]
        assert found["dtypes"] == ["torch.bfloat16"]
        assert found["pieces"] == (SENT if transport not in ("gloo", "file") else {})
        assert found["waits"] > 0


@pytest.mark.parametrize(
    ("careless", "message"),
    [
        (
            "import engine.client.publish.transports as t; t.use_device = lambda device: None",
            "sends from a device that is not its own",
        ),
        (
            "import torch, engine.client.publish.publisher as p; whole = p.Buffers\n"
            "p.Buffers = lambda count, timeout_s, device: whole(count, timeout_s, torch.device('cuda', 0))",
            "a piece lies on cuda:0, the group is of cuda:1",
        ),
        (
            "import torch, engine.wire.weights.checksum as c\n"
            "c._weights = lambda device: torch.ones(c.CHUNK, dtype=torch.int64)",
            "at least two devices, cuda:1 and cpu",
        ),
    ],
)
def test_a_thread_a_buffer_or_an_operand_on_another_device_would_be_noticed(careless, message):
    done = synced("cuda:1", "nccl", careless=careless)
    assert done.returncode != 0
    assert message in done.stderr


RECIPES = {path.stem: path for path in sorted((ROOT / "infra/recipes").rglob("*.toml"))}
QUICKSTART = "infra/recipes/quickstart.toml"
ROLLOUT = {"algorithm.old_policy": "rollout"}
PREVIOUS = {"algorithm.old_policy": "previous", "algorithm.kl_coef": 0.01}
ALGORITHMS = {
    "plain": {},
    "entropy": {"algorithm.entropy_coef": 0.01},
    "gspo": {"algorithm.loss": "gspo", **ROLLOUT},
    "cispo": {"algorithm.loss": "cispo", **ROLLOUT},
    "dual clip": {"algorithm.loss": "dapo", "algorithm.dual_clip": 3.0, **ROLLOUT},
    "dr_grpo": {"algorithm.loss": "dr_grpo", "algorithm.advantage": "dr_grpo"},
    "gpg": {"algorithm.loss": "gpg", "algorithm.advantage": "gpg", "algorithm.kl_coef": 0},
    "truncate": {"algorithm.mismatch": "truncate"},
    "mask": {"algorithm.mismatch": "mask"},
    "reject": {"algorithm.mismatch_reject": "sequence"},
    "measure": {"algorithm.gradient_control": "measure"},
    "selective": {"train.recompute": "selective"},
    "recompute": {"train.recompute": "true"},
    "one layer": {"train.recompute": 1},
    "fp32 head": {"model.head_dtype": "float32"},
    "offload": {**PREVIOUS, "train.offload": "true"},
    "zero": {"train.distributed_optimizer": "true"},
    "fp32": {"train.dtype": "float32", "model.dtype": "float32"},
    "masked": {"algorithm.mask_truncated": "true"},
    "plain prompts": {"attention.shared_prompt": "false"},
}


@pytest.mark.timeout(900)
def test_every_recipe_and_algorithm_takes_two_steps_on_an_npu():
    """Its kernels' operators are those of torch_npu's list, and no tensor is on the host where the device's is needed.
    Losses of a whole batch ask how many tokens they keep, which a device without data does not know."""
    cases = [{"name": name, "recipe": str(path), "keys": {}} for name, path in RECIPES.items()]
    cases += [{"name": name, "recipe": QUICKSTART, "keys": keys} for name, keys in ALGORITHMS.items()]
    done = subprocess.run(
        [sys.executable, ROOT / "tests/support/fake_npu_steps.py"],
        input="".join(json.dumps(case) + "\n" for case in cases),
        capture_output=True,
        text=True,
        timeout=880,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]  # others print, too
    found = {line["name"]: line["error"] for line in lines}
    assert found == {case["name"]: "" for case in cases}
    assert len(RECIPES) == 24
