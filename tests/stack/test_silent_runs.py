"""Flow runs whose end nobody hears of, on a real Prefect server and workers: the watchdog finds and resumes them."""

import os
import signal
import subprocess
import sys

import pytest

from support.flow_runs import get_json, kill, patiently, processes, start, state
from support.runs import ROOT, wait_for
from tasks.cluster.prefect_api import post_json
from tasks.cluster.watchdog import HEARTBEAT_S

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

SILENCE_S = 2 * HEARTBEAT_S + 10
"""Longer than two heartbeats: shorter, a run that lives is taken for dead between two of them."""
PENDING_S = SILENCE_S + 2 * HEARTBEAT_S
"""Longer than the slow flow takes to begin."""
POOL = "lonely"
"""Of its own: a worker that another test left on a shared pool would report the end that nobody is to hear of."""
NAMES = ("lonely", "unheard", "unbegun", "slow")
FLOW = """
import os, time
from pathlib import Path
from prefect import flow

if "{name}" == "slow" and "PREFECT__FLOW_RUN_ID" in os.environ:
    time.sleep({loads})

@flow(name="{name}")
def {name}(folder: str) -> None:
    with open(f"{{folder}}/starts", "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    while not os.path.exists(f"{{folder}}/go"):
        time.sleep(0.1)
"""
DEPLOY = """
import sys
from prefect import flow
from tasks.cluster import deploy, watchdog

deploy._make_pools({{{pool!r}: deploy.read_template("cpu")}})
for name in {names}:
    found = flow.from_source(source={folder!r}, entrypoint=f"{{name}}.py:{{name}}")
    found.deploy(name, work_pool_name={pool!r}, tags=[watchdog.TAG], build=False, push=False, print_next_steps=False)
"""


@pytest.fixture(scope="module")
def call(environment):
    """Runs Python code as a client of the server."""

    def called(code):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    return called


@pytest.fixture(scope="module")
def api(call, environment, tmp_path_factory):
    """The API's URL once flows are deployed that wait for a file."""
    folder = tmp_path_factory.mktemp("flows")
    for name in NAMES:
        (folder / f"{name}.py").write_text(FLOW.format(name=name, loads=SILENCE_S + HEARTBEAT_S))
    call(DEPLOY.format(names=NAMES, folder=str(folder), pool=POOL))
    return environment["PREFECT_API_URL"]


def begun(folder):
    return (folder / "starts").read_text().split() if (folder / "starts").exists() else []


def heard(api, run):
    """Whether the server has a heartbeat of the run."""
    asked = {
        "filter": {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": {"id": [f"prefect.flow-run.{run}"]}}
    }
    return patiently(post_json, f"{api}/events/filter", asked)["total"] > 0


def history(api, run):
    """(name, message) of all states of a run."""

    def read():
        return [(one["name"], one["message"]) for one in get_json(f"{api}/flow_run_states/?flow_run_id={run}")]

    return patiently(read)


@pytest.mark.nightly
def test_runs_whose_end_nobody_hears_of_are_found_and_go_on(api, services, start_worker, environment, tmp_path):
    """Worker and flows of two are killed, one before it began: nobody is left to report them. The worker reports the
    third. The last takes longer to begin than silence may last, and is left alone."""
    services["watchdog"].stop()
    folders = {name: tmp_path / name for name in NAMES}
    worker = start_worker(POOL, "lost")
    for folder in folders.values():
        folder.mkdir()
    first = NAMES[:2]
    runs = {name: start(api, name, {"folder": str(folders[name])}) for name in first}
    both = "both runs and a heartbeat"
    wait_for(lambda: all(begun(folders[name]) for name in first) and heard(api, runs["lonely"]), both, 120)
    kill(runs["unheard"], "prefect")
    wait_for(lambda: state(api, runs["unheard"])["type"] == "CRASHED", "the worker's report", 120)
    runs["unbegun"] = start(api, "unbegun", {"folder": str(folders["unbegun"])})
    wait_for(lambda: processes(runs["unbegun"]), "the process of the third run", 60)
    worker.kill()
    for name in ("lonely", "unbegun"):
        for pid in processes(runs[name]):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda name=name: not processes(runs[name]), "the end of the flow")
    assert state(api, runs["lonely"])["type"] == "RUNNING"
    assert state(api, runs["unbegun"])["type"] == "PENDING"

    for folder in folders.values():
        (folder / "go").touch()
    start_worker(POOL, "found")
    runs["slow"] = start(api, "slow", {"folder": str(folders["slow"])})
    limits = ["--every", "1", "--after", "1", "--silence", str(SILENCE_S), "--pending", str(PENDING_S)]
    dog = subprocess.Popen([sys.executable, "-m", "tasks.cluster.watchdog", *limits], env=environment, cwd=ROOT)
    try:
        for run in runs.values():
            wait_for(
                lambda run=run: state(api, run)["type"] == "COMPLETED", "the end of the second attempt", PENDING_S + 200
            )
    finally:
        dog.kill()
        dog.wait()
        services["watchdog"].start()
    resumed = ("AwaitingRetry", "Resumed after a crash")
    told = {name: history(api, run) for name, run in runs.items()}
    for name, crashed in (
        ("lonely", ("Crashed", f"No heartbeat for {SILENCE_S} s")),
        ("unbegun", ("Crashed", f"Did not start within {PENDING_S} s")),
    ):
        assert crashed in told[name], told
        assert told[name][told[name].index(crashed) + 1] == resumed
    assert resumed in told["unheard"]
    assert "Crashed" not in [name for name, _ in told["slow"]]
    assert [len(begun(folder)) for folder in folders.values()] == [2, 2, 1, 1]
