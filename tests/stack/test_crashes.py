"""Runs on real servers that lose or stop their processes in turn, or are cancelled: nothing is lost, nothing twice."""

import contextlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from chaos.checker import each_figure_once
from engine.run.checkpoint_files import latest_checkpoint, step_of
from engine.run.files import read_lines
from engine.run.run_file import read_run
from support import flow_runs
from support.brake import braked, slow_down
from support.flow_runs import kill, patiently, processes, state
from support.runs import ROOT, launch, overrides, seeded_settings, wait_for
from support.whole_runs import same, weights
from tasks.cluster.prefect_api import post_json
from tasks.stages.orchestrator_process import STOP_S

pytestmark = [pytest.mark.stack, pytest.mark.timeout(3000)]

PATIENCE_S = 600.0
"""Longest wait for anything; a quiet machine needs a tenth."""

METRONOME = [sys.executable, "-m", "flows.cli"]
GRACEFUL = [sys.executable, "-m", "tasks.cluster.graceful_worker"]
STEPS = 60
SLOW_S = 0.25
HELD_S = 40.0
"""Seconds that a group's reward takes, four times a step: while steps are waited for, and while anything else is, so
that the run is not through before a busy machine has done that. A reward may take 60 s."""
TIMEOUT_S = 15.0
"""train.timeout_s: an orchestrator that is stopped must be found after twice as long."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Run folders, and a reward that is as slow as the file `brake` says, so that a kill falls into training."""
    folder = tmp_path_factory.mktemp("crashes")
    braked(folder, HELD_S)
    return folder


@pytest.fixture(scope="module")
def small(place, tiny_model, problems):
    """Settings under which a run's numbers depend on nothing but its seed."""
    reward = f"{place / 'reward.py'}:reward"
    return seeded_settings(tiny_model, problems, place, reward) | {"reward.timeout_s": 60, "train.steps": STEPS}


@pytest.fixture(scope="module")
def undisturbed(small, place):
    """Final weights of the run that nothing happens to."""
    slow_down(place, 0)
    code, output = launch(small | {"run.name": "undisturbed"}, place)
    slow_down(place, HELD_S)
    assert code == 0, output
    return weights(place, "undisturbed")


@pytest.fixture(scope="module")
def deployed(services, environment):
    """The API's URL once the deployments are there."""
    command = [*METRONOME, "deploy"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed by the watchdog, which looked" in done.stdout
    return environment["PREFECT_API_URL"]


def start(api, settings):
    """A flow run of the deployment `pipeline`, as the UI's form starts it; its id."""
    return flow_runs.start(api, "pipeline", {"overrides": overrides(settings)})


def last_step(folder):
    return max((row["step"] for row in read_lines(folder / "steps.jsonl")), default=-1)


def wait_for_two_steps(folder, api=None, run=None):
    """Until two more steps are finished, of which one is in a checkpoint, with at least ten still to come."""
    before = last_step(folder)

    def moved():
        if last_step(folder) > before + 1:
            return True
        with contextlib.suppress(OSError):  # the server is busy; while it is asked, the run goes on
            now = state(api, run, within_s=2.0) if api else None
            assert now is None or now["type"] not in ("FAILED", "CANCELLED", "COMPLETED"), now
        return False

    slow_down(folder.parent, SLOW_S)
    wait_for(moved, f"two steps after step {before}", PATIENCE_S)
    slow_down(folder.parent, HELD_S)
    assert last_step(folder) < STEPS - 10, "the run is nearly through: what follows would not fall into training"


def file_number(folder):
    return (folder / "steps.jsonl").stat().st_ino


def wait_for_resume(folder, killed_in, api, run):
    """Until the run was started again (its trainer has cut steps.jsonl, so it is another file) and trains."""
    wait_for(lambda: file_number(folder) != killed_in, "the run to be started again", PATIENCE_S)
    wait_for_two_steps(folder, api, run)


@pytest.mark.nightly
def test_every_process_of_a_run_may_die(deployed, services, start_worker, environment, small, place, undisturbed):
    api = deployed
    folder = place / "killed"
    worker = start_worker("cpu", "mortal")
    run = start(api, small | {"run.name": "killed", "train.timeout_s": TIMEOUT_S})
    wait_for_two_steps(folder, api, run)
    for part in ("engine.trainer.rank --", "engine.orchestrator.launch", "prefect.engine"):
        killed_in = file_number(folder)
        kill(run, part)
        wait_for_resume(folder, killed_in, api, run)

    killed_in = file_number(folder)
    kill(run, "engine.orchestrator.launch", signal.SIGSTOP)
    wait_for_resume(folder, killed_in, api, run)
    whys = [one.why for one in read_run(folder).attempts if one.what == "training"]
    limit_s = 2 * TIMEOUT_S - STOP_S
    assert f"gave no sign of life for {limit_s:g} s (2 x train.timeout_s, less {STOP_S:g} s to end in)" in whys[-1]

    services["prefect"].kill()
    wait_for_two_steps(folder)  # without a Prefect server
    services["prefect"].start()
    services["prefect"].wait()

    killed_in = file_number(folder)
    worker.kill()
    slow_down(place, SLOW_S)  # the flow ends when it has something to say and nobody listens
    wait_for(lambda: not processes(run), "the end of a flow without a worker", PATIENCE_S)
    assert last_step(folder) < STEPS - 5
    start_worker("cpu", "successor")
    wait_for(lambda: file_number(folder) != killed_in, "the run to be started again", PATIENCE_S)
    slow_down(place, 0)
    wait_for(lambda: state(api, run)["type"] == "COMPLETED", "the end of the run", PATIENCE_S)
    slow_down(place, HELD_S)

    assert same(weights(folder.parent, folder.name), undisturbed)
    assert [row["step"] for row in read_lines(folder / "steps.jsonl")] == list(range(STEPS))
    # before and after, though the flow began three times
    assert len(list(read_lines(folder / "evaluations.jsonl"))) == 2
    assert each_figure_once(environment["MLFLOW_TRACKING_URI"], folder) == []


@pytest.mark.nightly
def test_a_cancelled_run_leaves_no_process_and_goes_on(deployed, start_worker, environment, small, place, undisturbed):
    api = deployed
    folder = place / "cancelled"
    start_worker("cpu", "third")
    settings = small | {"run.name": "cancelled", "checkpoint.every": 0}
    run = start(api, settings)
    wait_for_two_steps(folder, api, run)
    assert len(processes(run)) >= 5  # flow, orchestrator, instance, agent, rank
    slow_down(place, SLOW_S)
    asked = time.monotonic()
    patiently(post_json, f"{api}/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    wait_for(lambda: not processes(run), "the end of all processes of a cancelled run", 15)
    print(f"no process is left {time.monotonic() - asked:.1f} s after the cancel")
    wait_for(lambda: state(api, run)["type"] == "CANCELLED", "the state CANCELLED", PATIENCE_S)
    done = last_step(folder) + 1
    # it is there because of the cancel: checkpoint.every is 0
    assert step_of(latest_checkpoint(folder / "checkpoints")) == done < STEPS

    slow_down(place, 0)
    sets = [part for override in overrides(settings) for part in ("--set", override)]
    again = subprocess.run(
        [*METRONOME, "run", "--resume", *sets],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    slow_down(place, HELD_S)
    assert again.returncode == 0, again.stdout + again.stderr
    assert same(weights(folder.parent, folder.name), undisturbed)
    assert [row["step"] for row in read_lines(folder / "steps.jsonl")] == list(range(STEPS))
    assert each_figure_once(environment["MLFLOW_TRACKING_URI"], folder) == []


@pytest.mark.nightly
def test_a_worker_that_is_stopped_saves_its_run_and_hands_it_on(deployed, start_worker, environment, small, place):
    api = deployed
    folder = place / "stopped"
    start_worker.stop()  # those of the tests before, which might take the run
    worker = subprocess.Popen([*GRACEFUL, "--pool", "cpu"], env=environment, cwd=ROOT)
    try:
        run = start(api, small | {"run.name": "stopped", "checkpoint.every": 0})
        wait_for_two_steps(folder, api, run)
        slow_down(place, SLOW_S)
        asked = time.monotonic()
        worker.terminate()
        assert worker.wait(60) == 0
        print(f"the worker has ended {time.monotonic() - asked:.1f} s after SIGTERM")
    finally:
        worker.kill()
        worker.wait()
    assert not processes(run)
    assert state(api, run)["type"] in ("CRASHED", "SCHEDULED")  # its flow has said so itself
    # it is there because of the stop: checkpoint.every is 0
    assert step_of(latest_checkpoint(folder / "checkpoints")) == last_step(folder) + 1 < STEPS
    start_worker("cpu", "next")
    slow_down(place, 0)
    wait_for(lambda: state(api, run)["type"] == "COMPLETED", "the end of the run", PATIENCE_S)
    print(f"completed {time.monotonic() - asked:.1f} s after SIGTERM")
    slow_down(place, HELD_S)
    assert [row["step"] for row in read_lines(folder / "steps.jsonl")] == list(range(STEPS))


@pytest.mark.nightly
def test_a_run_that_gets_no_further_ends_with_the_reason(environment, small, place):
    """Its orchestrator is killed whenever it has started; two attempts are allowed, no checkpoint comes of them."""
    settings = small | {"run.name": "hopeless", "run.resumes": 1, "checkpoint.every": 0}
    sets = [part for override in overrides(settings) for part in ("--set", override)]
    flow = subprocess.Popen([*METRONOME, "run", *sets], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        killed = set()
        while flow.poll() is None:
            with contextlib.suppress(
                psutil.NoSuchProcess
            ):  # it, or the flow, ended while we looked (a zombie counts as that)
                for child in psutil.Process(flow.pid).children():
                    if child.pid not in killed and "engine.orchestrator.launch" in " ".join(child.cmdline()):
                        time.sleep(1.0)
                        child.kill()
                        killed.add(child.pid)
            time.sleep(0.2)
        message = flow.stderr.read()
    finally:
        flow.kill()
        flow.wait()
    assert len(killed) == 2
    assert flow.returncode == 1
    assert "the training of run hopeless was started 2 times from the same point" in message
    assert "SIGKILL" in message
    assert "run.resumes = 1" in message
