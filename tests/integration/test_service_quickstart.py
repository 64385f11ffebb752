"""The example trainer learns the quickstart through the service as well as Megatron does. Many minutes long."""

import json
import subprocess
import sys
import time

import pytest

from engine.run.files import read_lines
from support.runs import ROOT, wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]
SETTINGS = ("train.consume=prompt_order", "rollout.deterministic=true")
"""Make responses a function of the weights, and the order of training one of the prompts."""
EQUAL = 6
"""Steps whose rewards must be equal. Later a token may be sampled otherwise, since the weights differ by rounding."""


def command(name, run, *arguments):
    """A command of `metronome` for a run in this checkout."""
    given = [part for one in (*SETTINGS, f"run.name={run}") for part in ("--set", one)]
    return [sys.executable, "-m", "flows.cli", name, *given, *arguments]


def finished(arguments):
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=700, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def accuracy(policy, run):
    finished(command("evaluate", run, "--model", str(policy)))
    (row,) = read_lines(ROOT / "runs" / run / "evaluations.jsonl")
    assert row["problems"] == 256
    return row["avg_at_k"]


def test_the_example_trainer_learns_the_quickstart_as_megatron_does(tmp_path):
    name = f"test-{time.time_ns()}"
    finished(command("train", name))
    service = subprocess.Popen(command("service", f"{name}-service"), cwd=ROOT)
    try:
        folder = ROOT / "runs" / f"{name}-service"
        wait_for((folder / "rollout.address").exists, "the service", 200)
        finished([sys.executable, "docs/examples/hf_trainer.py", str(folder), "--out", str(tmp_path)])
    finally:
        service.terminate()
        assert service.wait(30) == 0
    own = [row["reward_mean"] for row in read_lines(ROOT / "runs" / name / "steps.jsonl")]
    example = [json.loads(line)["reward_mean"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    print(own[:10], example[:10], sep="\n")
    assert example[:EQUAL] == pytest.approx(own[:EQUAL])
    assert len(example) == len(own)
    megatron, huggingface = (
        accuracy(policy, f"{name}-{who}")
        for who, policy in (("own", ROOT / "runs" / name / "policy"), ("example", tmp_path / "policy"))
    )
    assert huggingface >= 0.85
    assert abs(huggingface - megatron) <= 0.05
