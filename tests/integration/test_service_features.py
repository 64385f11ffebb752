"""What works behind the service as in a run: dynamic sampling, staged weights, evaluation in the drain, publishing from
several ranks."""

import os
import subprocess
import sys

import pytest

from docs.examples.hf_trainer import HuggingFaceTrainer
from engine.client.service import ServiceClient
from engine.run.files import read_lines
from engine.trainer.loop import Loop
from engine.trainer.rollouts import LiveRollouts
from support.runs import ROOT, config_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TWO_RANKS = """
import json, sys, torch.distributed as dist
from docs.examples.hf_trainer import HuggingFaceTrainer
from engine.client.ranks import HostRanks
from engine.client.service import ServiceClient
from engine.trainer.loop import Loop
from engine.trainer.rollouts import LiveRollouts

class Replica(HuggingFaceTrainer):
    def update(self, responses):
        for parameter in self.policy.parameters():
            if parameter.grad is None:
                parameter.grad = parameter.new_zeros(parameter.shape)
            dist.all_reduce(parameter.grad)
        return super().update(responses)

dist.init_process_group("gloo")
with ServiceClient.init_engines(sys.argv[1]) as service:
    trainer = Replica(service.config)
    ranks = HostRanks(60.0)
    with open(f"{sys.argv[2]}/rank-{dist.get_rank()}.jsonl", "w") as lines:
        told = lambda step, figures: print(json.dumps(figures), file=lines)
        Loop(service.config, trainer, LiveRollouts.of(service, ranks), told).run()
"""


@pytest.fixture
def seeded(settings):
    return settings | {"train.steps": 2, "train.consume": "prompt_order", "rollout.deterministic": True}


def served(settings, trainer=HuggingFaceTrainer):
    """The figures of each step of a trainer outside, and the folder of its service."""
    rows = []
    with ServiceClient.init_engines(config_of(settings)) as service:
        report = lambda step, figures: rows.append({"step": step, **figures})  # noqa: E731
        Loop(service.config, trainer(service.config), LiveRollouts.of(service), report).run()
        return rows, service.config.folder


def test_evaluations_run_in_the_drain(seeded):
    more = {"evaluate.every": 1, "evaluate.problems": 3, "evaluate.max_new_tokens": 4, "train.steps": 3}
    rows, folder = served(seeded | more)
    assert len(rows) == 3
    assert [row["weight_version"] for row in read_lines(folder / "evaluations.jsonl")] == [0, 1]


def test_two_ranks_of_plain_torch_publish_and_train_as_one(seeded, tmp_path):
    alone, _ = served(seeded | {"run.name": "alone"})
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    with ServiceClient.init_engines(config_of(seeded | {"run.name": "two"})) as service:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        done = subprocess.run(
            [sys.executable, *command, str(service.config.folder), str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=False,
        )
    assert done.returncode == 0, done.stderr
    of_rank = [list(read_lines(tmp_path / f"rank-{rank}.jsonl")) for rank in range(2)]
    for row, one, other in zip(alone, *of_rank, strict=True):
        assert sorted(one["groups"] + other["groups"]) == row["groups"], "each group is trained by one of the ranks"
        assert one["grad_norm"] == other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-3)
