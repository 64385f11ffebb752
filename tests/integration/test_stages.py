"""A stage of the user's own in a real run: a program that reads responses and gives a column that enters the reward."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from support.runs import ROOT, wait_for, write_config
from support.whole_runs import same, steps, weights

pytestmark = pytest.mark.timeout(600)
LEASE_S = 2.0


@pytest.fixture
def judged(settings):
    """A run with the stage of docs/examples/repetition_stage.py; its numbers depend on nothing but its seed."""
    return settings | {
        "train.steps": 2,
        "train.consume": "prompt_order",
        "rollout.deterministic": True,
        "stages.repetition.needs": ["responses"],
        "stages.repetition.gives": ["repetition"],
        "stages.repetition.reward_weight": 2.0,
        "stages.repetition.lease_s": LEASE_S,
    }


class Started:
    """A run and its programs; all are ended with the block."""

    def __init__(self, settings, folder):
        self.folder = folder / settings["run.name"]
        self.processes = []
        config = str(write_config(settings, folder))
        self.run = self._start(f"{settings['run.name']}.log", ["-m", "engine.orchestrator.launch", "--config", config])

    def _start(self, log, command):
        path = self.folder.parent / log
        with open(path, "a") as file:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=file,
            )
        self.processes.append(process)
        process.log = path
        return process

    def judge(self):
        wait_for((self.folder / "rollout.address").exists, "the run's address")
        return self._start("judge.log", ["docs/examples/repetition_stage.py", str(self.folder), "--phrase", "1"])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(30)


def finish(started, judge):
    assert started.run.wait(200) == 0, started.run.log.read_text()
    assert judge.wait(30) == 0, judge.log.read_text()


@pytest.mark.slow
def test_a_column_of_a_program_enters_the_reward_and_a_program_that_dies_or_hangs_changes_no_bit(judged, tmp_path):
    with Started(judged | {"run.name": "calm"}, tmp_path) as calm:
        finish(calm, calm.judge())
    said = (tmp_path / "judge.log").read_text().splitlines()
    assert {line.split(":")[0] for line in said} == {"step 0", "step 1"}
    plain = {key: value for key, value in judged.items() if not key.startswith("stages.")}
    with Started(plain | {"run.name": "plain"}, tmp_path) as other:
        assert other.run.wait(200) == 0, other.run.log.read_text()
    assert steps(tmp_path, "calm")[0]["reward_mean"] > steps(tmp_path, "plain")[0]["reward_mean"] + 0.01
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        with Started(judged | {"run.name": name}, tmp_path) as disturbed:
            first = disturbed.judge()
            seen = len(said)
            wait_for(lambda log=first.log, seen=seen: len(log.read_text().splitlines()) > seen, "a judged group")
            first.send_signal(number)
            finish(disturbed, disturbed.judge())
        said = (tmp_path / "judge.log").read_text().splitlines()
        assert same(weights(tmp_path, name), weights(tmp_path, "calm"))
        assert [one["reward_mean"] for one in steps(tmp_path, name)] == [
            one["reward_mean"] for one in steps(tmp_path, "calm")
        ]


@pytest.mark.slow
def test_a_stage_that_never_comes_ends_the_run_by_name(judged, tmp_path):
    began = time.monotonic()
    with Started(judged | {"run.name": "alone", "stages.repetition.wait_s": 2.0}, tmp_path) as alone:
        assert alone.run.wait(200) == 1
    assert time.monotonic() - began < 120
    failure = json.loads((tmp_path / "alone" / "failure.json").read_text())
    assert "have waited 2 s (stages.repetition.wait_s) for the stage 'repetition': no program has asked" in str(failure)
