"""Every advantage and loss in whole runs: it trains, and a recorded periodic run replays in sync, the same bit for bit."""

import math

import pytest
from conftest import launch
from safetensors.numpy import load_file

from engine.algorithm.advantages import ADVANTAGES
from engine.algorithm.losses import LOSSES
from engine.config import BATCH_SCOPE
from engine.run_folder import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PAIRS = [("grpo", "grpo"), ("rloo", "dapo"), ("opo", "dr_grpo"), ("dr_grpo", "gspo"), ("grpo_passk", "cispo"), ("gpg", "grpo")]
STEPS = 20


def run(settings, folder, *arguments):
    code, output = launch(settings, folder, *arguments)
    assert code == 0, output
    return list(read_lines(folder / settings["run.name"] / "steps.jsonl"))


def weights(folder, name):
    return {key: tensor.tobytes() for key, tensor in load_file(folder / name / "policy/model.safetensors").items()}


def settings_of(settings, advantage, loss):
    return settings | {"algorithm.advantage": advantage, "algorithm.loss": loss, "rollout.concurrency": 2,
                       "algorithm.kl_coef": 0 if advantage == "gpg" else 0.01, "train.steps": STEPS,
                       "checkpoint.every": 0}  # fmt: skip


def test_all_are_here():
    assert {advantage for advantage, _ in PAIRS} | set(BATCH_SCOPE) == ADVANTAGES.keys()
    assert {loss for _, loss in PAIRS} == LOSSES.keys()


@pytest.mark.parametrize(("advantage", "loss"), PAIRS)
def test_it_trains_in_sync_and_a_recorded_periodic_run_replays_bit_identically(settings, tmp_path, advantage, loss):
    chosen = settings_of(settings, advantage, loss)
    lines = run(chosen | {"run.name": "sync", "train.mode": "sync", "train.steps": 3}, tmp_path)
    for line in lines:
        assert math.isfinite(line["loss"])
        assert math.isfinite(line["grad_norm"])
        assert line["max_ratio_gap"] <= 1e-3
    assert max(line["grad_norm"] for line in lines) > 0
    check_replay(chosen, tmp_path)


@pytest.mark.parametrize("advantage", BATCH_SCOPE)
def test_batch_statistics_train_in_sync_and_replay(settings, tmp_path, advantage):
    sync = settings_of(settings, advantage, "grpo") | {"train.mode": "sync", "train.steps": 4}
    live = run(sync | {"run.name": "live", "train.record": True}, tmp_path)
    replayed = run(sync | {"run.name": "replayed"}, tmp_path, "--replay", str(tmp_path / "live/record.msgpack"))
    assert weights(tmp_path, "live") == weights(tmp_path, "replayed")
    assert [line["grad_norm"] for line in live] == [line["grad_norm"] for line in replayed]
    assert min(line["grad_norm"] for line in live) > 0
    assert max(line["max_ratio_gap"] for line in live) <= 1e-3


@pytest.mark.parametrize(("advantage", "loss"), [("opo", "dapo"), ("grpo", "gspo")])
def test_the_same_on_four_ranks(settings, tmp_path, advantage, loss):
    check_replay(settings_of(settings, advantage, loss) | {"parallel.tensor": 2, "parallel.data": 2}, tmp_path)


def check_replay(chosen, folder):
    live = run(chosen | {"run.name": "live", "train.record": True}, folder)
    replayed = run(chosen | {"run.name": "replayed"}, folder, "--replay", str(folder / "live/record.msgpack"))
    assert len(live) == len(replayed) == STEPS
    assert weights(folder, "live") == weights(folder, "replayed")
    for one, other in zip(live, replayed, strict=True):
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
