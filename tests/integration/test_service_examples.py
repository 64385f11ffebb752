"""The examples of docs/service.md: trainers through the service against Megatron's own loop."""

import json

import pytest
import torch

from docs.examples.hf_trainer import HuggingFaceTrainer
from engine.client.service import ServiceClient
from engine.trainer.loop import Loop
from engine.trainer.rollouts import LiveRollouts
from support.runs import config_of, launch

pytestmark = pytest.mark.timeout(600)
START_S = 200
"""Seconds that a service may take to start on a busy machine."""


@pytest.fixture
def seeded(settings):
    return settings | {
        "train.consume": "prompt_order",
        "rollout.deterministic": True,
        "rollout.timeout_s": START_S,
        "train.timeout_s": START_S,
        "train.steps": 2,
    }


def megatron_rows(seeded, folder):
    """The steps of a run with our own trainer."""
    code, output = launch(seeded | {"run.name": "megatron"}, folder)
    assert code == 0, output
    return [json.loads(line) for line in (folder / "megatron" / "steps.jsonl").read_text().splitlines()]


def train(client, trainer, ranks=None):
    """The figures of each step that a trainer outside has trained."""
    rows = []
    rollouts = LiveRollouts.of(client, ranks)
    Loop(client.config, trainer, rollouts, lambda step, figures: rows.append({"step": step, **figures})).run()
    return rows


@pytest.mark.slow
def test_the_example_trainer_gets_the_rewards_of_megatron(seeded, tmp_path):
    """Equal tokens, and so equal rewards, as long as the two trainers' weights differ by rounding only."""
    megatron = megatron_rows(seeded, tmp_path)
    with ServiceClient.init_engines(config_of(seeded | {"run.name": "example"})) as client:
        rows = train(client, HuggingFaceTrainer(client.config))
    assert [row["reward_mean"] for row in rows] == pytest.approx([row["reward_mean"] for row in megatron])
    assert [row["grad_norm"] for row in rows] == pytest.approx([row["grad_norm"] for row in megatron], rel=1e-4)
    assert [row["groups"] for row in rows] == [list(range(6))] * 2
    assert [row["versions_seen"] for row in rows] == [[0], [1]]


@pytest.mark.slow
def test_megatron_is_trained_through_the_service_as_by_its_own_loop(seeded, tmp_path):
    from engine import platform
    from engine.trainer.policy import Policy

    own = megatron_rows(seeded, tmp_path)
    cpu = platform.get_platform("cpu")
    with ServiceClient.init_engines(config_of(seeded | {"run.name": "through"})) as client:
        with platform.single_session(cpu):
            rows = train(client, Policy(client.config, cpu))
    for key in ("reward_mean", "loss", "kl", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in own], rel=1e-6), key


def test_probe_and_tensors_of_the_example_are_those_of_its_model(tiny_model, settings):
    trainer = HuggingFaceTrainer(config_of(settings))
    names = [name for name, _ in trainer.tensors()]
    assert "lm_head.weight" not in names, "tied tensors come once"
    with torch.no_grad():
        logits = trainer.policy(torch.tensor([[3, 4, 5]])).logits[0].log_softmax(-1)
    assert trainer.probe([3, 4, 5]) == pytest.approx([float(logits[0, 4]), float(logits[1, 5])])
