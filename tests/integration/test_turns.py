"""On real processes: a rollout program's responses and weights depend on nothing but its input."""

import os

import pytest
from safetensors.numpy import load_file

from engine.run.files import read_lines
from support.runs import ROOT, launch

PROGRAMS = f"{ROOT}/tests/support/programs.py"


@pytest.mark.faults
def test_deaths_of_instance_program_and_orchestrator_change_no_bit(settings, tmp_path, monkeypatch):
    """`sync` without a death = `periodic` on two instances with a death of each kind in mid-episode, resumed."""
    exact = settings | {"rollout.deterministic": True, "train.consume": "prompt_order", "checkpoint.every": 1}
    monkeypatch.setenv("METRONOME_TEST_MARKS", str(tmp_path / "marks"))
    (tmp_path / "marks").mkdir()
    plain = {"run.name": "sync", "train.mode": "sync", "rollout.program": f"{PROGRAMS}:doubling"}
    code, output = launch(exact | plain, tmp_path)
    assert code == 0, output
    struck = exact | {
        "run.name": "struck",
        "train.mode": "periodic",
        "rollout.instances": 2,
        "rollout.program": f"{PROGRAMS}:struck",
        "reward.environment": ["METRONOME_TEST_MARKS"],
    }
    code, output = launch(struck, tmp_path)
    assert code < 0, output  # the program has killed it
    assert {"instance", "worker", "orchestrator"} <= set(os.listdir(tmp_path / "marks"))
    code, output = launch(struck, tmp_path, "--resume")
    assert code == 0, output
    weights = [load_file(tmp_path / name / "policy/model.safetensors") for name in ("sync", "struck")]
    assert {key: value.tobytes() for key, value in weights[0].items()} == {
        key: value.tobytes() for key, value in weights[1].items()
    }
    for name in ("sync", "struck"):
        lines = list(read_lines(tmp_path / name / "steps.jsonl"))
        assert [line["versions_seen"] for line in lines] == [[0], [1], [2]]
        assert max(line["max_ratio_gap"] for line in lines) <= 1e-3
        assert {line["reward/episode/turns"] for line in lines} == {2.0}
        assert {line["reward/calls"] for line in lines} == {1.0}
        assert len({line["grad_norm"] for line in lines}) == 3
