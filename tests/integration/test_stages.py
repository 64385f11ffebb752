"""A stage of the user's own in a real run: a program that reads responses and gives a column that enters the reward."""

import json
import os
import signal
import subprocess
import sys
import time
from statistics import fmean

import pytest

from engine.wire import record
from support.runs import ROOT, wait_for, write_config
from support.whole_runs import same, steps, weights

pytestmark = pytest.mark.timeout(600)
LEASE_S = 2.0
STEPS = 4


@pytest.fixture
def judged(settings):
    """A run with the stage of docs/examples/repetition_stage.py; its numbers depend on nothing but its seed."""
    return settings | {
        "train.steps": STEPS,
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


def expected_reward(folder):
    """Mean over step 0 of the reward and 2.0 times the share of tokens that a response has had before."""
    entries = [entry for entry in record.read_record(folder / "record.msgpack") if entry.step == 0]
    scored = [
        (score.value, 1 - len(set(response.token_ids)) / len(response.token_ids))
        for entry in entries
        for group in entry.window()
        for score, response in zip(group.scores, group.responses, strict=True)
    ]
    assert fmean(share for _, share in scored) > 0.005
    return fmean(value + 2.0 * share for value, share in scored)


@pytest.mark.slow
def test_a_column_of_a_program_enters_the_reward_and_programs_that_die_or_hang_change_no_bit(judged, tmp_path):
    with Started(judged | {"run.name": "calm", "train.record": True}, tmp_path) as calm:
        finish(calm, calm.judge())
    said = (tmp_path / "judge.log").read_text().splitlines()
    assert {line.split(":")[0] for line in said} == {f"step {step}" for step in range(STEPS)}
    assert steps(tmp_path, "calm")[0]["reward_mean"] == pytest.approx(expected_reward(tmp_path / "calm"))
    with Started(judged | {"run.name": "disturbed"}, tmp_path) as disturbed:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            judge = disturbed.judge()
            seen = len(said)
            wait_for(lambda log=judge.log, seen=seen: len(log.read_text().splitlines()) > seen, "a judged group")
            judge.send_signal(number)
            said = judge.log.read_text().splitlines()
        assert disturbed.run.poll() is None
        finish(disturbed, disturbed.judge())
    assert same(weights(tmp_path, "disturbed"), weights(tmp_path, "calm"))
    assert [one["reward_mean"] for one in steps(tmp_path, "disturbed")] == [
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
