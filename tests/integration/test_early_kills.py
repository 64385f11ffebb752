"""`metronome run` killed in each of its stages, at ten moments each: each next call goes on, and the last ends.

Also Prefect's server, whose database a first start makes.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pytest

from engine.run.files import read_lines
from support.runs import ROOT, overrides, wait_for

pytestmark = pytest.mark.slow
STEPS = 12
MOMENTS = (
    ("Prefect's database", "prefect/prefect.db", 3.0),
    ("MLflow's store", ".mlflow.db.partial", 3.0),
    ("prepare data ...", None, 1.0),
    ("encode       ...", None, 1.0),
    ("convert      ...", None, 5.0),
    ("evaluate     ...", None, 4.0),
    ("train        ...", None, 8.0),
    ("a step", "kills/steps.jsonl", 0.2),
    ("a checkpoint", "kills/checkpoints/.step-*.partial", 0.1),
    ("publish      ...", None, 0.2),
    ("register     ...", None, 0.3),
)
"""What a call prints, or the file that it makes, and the most seconds from then to its end."""


class Call:
    """A `metronome run` in a process group of its own."""

    def __init__(self, settings, log):
        self.output = Path(settings["run.output"])
        sets = [part for override in overrides(settings) for part in ("--set", override)]
        resumed = ["--resume"] if (self.output / "kills/config.toml").exists() else ["infra/recipes/quickstart.toml"]
        command = [str(Path(sys.executable).parent / "metronome"), "run", *resumed, *sets]
        self.log = log
        with log.open("w") as told:
            self.process = subprocess.Popen(
                command, stdout=told, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
            )

    def reached(self, line, made):
        """Whether the call printed the line, or made the file."""
        return any(self.output.glob(made)) if made else line in self.log.read_text()

    def until(self, line, made, timeout_s=300.0):
        """Wait for the moment. A call that ended before was not killed: it is what this test looks for."""
        deadline = time.monotonic() + timeout_s
        while not self.reached(line, made):
            assert self.process.poll() is None, f"the call before {line!r} ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"no {line!r} in {timeout_s:g} s:\n{self.log.read_text()}"
            time.sleep(0.01)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # two minutes on two idle cores
@pytest.mark.parametrize("moments", [MOMENTS[:6], MOMENTS[6:]], ids=["before training", "from training on"])
@pytest.mark.parametrize("seed", range(10))
def test_after_a_kill_at_any_moment_the_next_call_goes_on(settings, tmp_path, seed, moments):
    chance = random.Random(10 * int(os.environ.get("METRONOME_SEED", "0")) + seed)
    settings |= {
        "run.name": "kills",
        "train.steps": STEPS,
        "train.prompts_per_step": 2,
        "checkpoint.every": 1,
        "rollout.max_new_tokens": 8,
        "evaluate.problems": 4,
        "evaluate.max_new_tokens": 8,
    }
    for line, made, seconds in moments:
        call = Call(settings, tmp_path / "log")
        try:
            call.until(line, made)
            time.sleep(chance.uniform(0.0, seconds))
        finally:
            call.kill()
    last = Call(settings, tmp_path / "log")
    try:
        assert last.process.wait(300) == 0, last.log.read_text()
    finally:
        last.kill()
    assert [row["step"] for row in read_lines(tmp_path / "kills/steps.jsonl")] == list(range(STEPS))
    assert [row["weight_version"] for row in read_lines(tmp_path / "kills/evaluations.jsonl")] == [0, STEPS]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    [run] = client.search_runs([e.experiment_id for e in client.search_experiments()], "attributes.run_name = 'kills'")
    assert run.info.status == "FINISHED"
    assert {one.step for one in client.get_metric_history(run.info.run_id, "reward_mean")} == set(range(STEPS))
    assert len(client.search_model_versions()) == 1


LOCAL_SERVER = """
import sys
from pathlib import Path
from tasks.cluster.local_server import local_server
with local_server(Path(sys.argv[1])) as wait:
    wait()
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", [0, *(pytest.param(later, marks=pytest.mark.nightly) for later in (1, 2, 3))])
def test_prefects_server_starts_on_a_database_that_was_made_halfway(tmp_path, moment):
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    command = [sys.executable, "-c", LOCAL_SERVER, str(tmp_path)]
    first = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        wait_for((tmp_path / "prefect/prefect.db").exists, "Prefect's database")
        time.sleep(random.Random(moment).uniform(0.0, 5.0))
    finally:
        first.kill()
        first.wait(30)
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=200)
