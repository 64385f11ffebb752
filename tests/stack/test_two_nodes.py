"""Trainer ranks on two nodes through Prefect: two workers of one pool stand for two machines.

The run is cancelled and resumed from the deployment's form; another run waits meanwhile.
"""

import subprocess
import sys
import time

import pytest

from engine.run.checkpoint_files import latest_checkpoint, step_of
from engine.run.files import read_lines
from support.brake import braked, slow_down
from support.flow_runs import patiently, processes, start, state
from support.ports import two_neighbours
from support.runs import ROOT, overrides, wait_for
from tasks.cluster.other_nodes import NOTES
from tasks.cluster.prefect_api import post_json

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1200)]

POOL = "pair"
ENDS = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
STEPS = 5
SLOW_S = 1.0
HELD_S = 40.0
"""Seconds that a group's reward takes, six times a step: during the first step, and then until the cancel. A reward may
take 60 s."""
WORKER = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
DEPLOY = f"""
from prefect.client.orchestration import get_client
from tasks.cluster import deploy
from tasks.cluster.deploy import Choices

tree = deploy.read_deployments("infra/recipes/quickstart.toml", [], Choices(pool="{POOL}"))
train = next(one for one in tree["deployments"] if one["name"] == "train")
node = next(one for one in tree["deployments"] if one["name"] == "join-training")
tree["deployments"] = [train | {{"name": "counted", "entrypoint": "support.counted.train"}}, node]
deploy._make_pools({{"{POOL}": deploy.read_template("cpu")}})
deploy._deploy(tree)
with get_client(sync_client=True) as client:
    client.upsert_global_concurrency_limit_by_name("ascend-npus", 3)
"""
ONE_RUN = ["-m", "prefect", "work-queue", "set-concurrency-limit", "default", "1", "--pool", POOL]
"""Two nodes are enough for one run on two nodes (docs/operate.md)."""


@pytest.fixture(scope="module")
def api(start_worker, environment):
    """The API's URL once training and further nodes are deployed, there are three NPUs,
    and two workers for one run at a time."""
    for command in (["-c", DEPLOY], ONE_RUN):
        done = subprocess.run(
            [sys.executable, *command], env=environment | WORKER, cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
    for name in ("node-0", "node-1"):
        start_worker(POOL, name, WORKER, limit=1)
    return environment["PREFECT_API_URL"]


def slots(api):
    """How many of the limit's slots are taken."""
    [limit] = [
        one for one in patiently(post_json, f"{api}/v2/concurrency_limits/filter", {}) if one["name"] == "ascend-npus"
    ]
    return limit["active_slots"]


def worker_of(api, run):
    """Name of the worker that a flow run was on."""

    def read():
        asked = {
            "filter": {
                "event": {"name": ["prefect.worker.submitted-flow-run"]},
                "related": {"id": [f"prefect.flow-run.{run}"]},
            }
        }
        [event] = post_json(f"{api}/events/filter", asked)["events"]
        return event["resource"]["prefect.resource.name"]

    return patiently(read)


def ended(api, run, timeout_s=300):
    """The type of a flow run's final state."""
    wait_for(lambda: state(api, run)["type"] in ENDS, "the end of a flow run", timeout_s)
    return state(api, run)["type"]


def node_of(api, run, folder):
    """The flow run of the run's second node; it is on the worker that the run is not on."""
    [node] = [row["flow_run_id"] for row in read_lines(folder / NOTES)]
    assert {worker_of(api, run), worker_of(api, node)} == {"node-0", "node-1"}
    return node


def cancel(api, run, node):
    """As the UI's button does: no process of either node is left after 15 s."""
    assert len(processes(run)) >= 5  # flow, orchestrator, instance, agent, rank
    assert len(processes(node)) >= 3  # flow, agent, rank
    asked = time.monotonic()
    patiently(post_json, f"{api}/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    wait_for(lambda: not processes(run) and not processes(node), "the end of all processes of both nodes", 15)
    print(f"no process is left on two nodes {time.monotonic() - asked:.1f} s after the cancel")
    assert [ended(api, run), ended(api, node)] == ["CANCELLED", "CANCELLED"]


@pytest.mark.nightly
def test_a_run_on_two_nodes_is_cancelled_and_resumed_and_one_waits(api, settings, tmp_path):
    """The run that waits would take the worker of the first one's second node, and wait there for NPUs."""
    common = settings | {
        "train.steps": STEPS,
        "parallel.data": 2,
        "train.consume": "prompt_order",
        "rollout.deterministic": True,
        "rollout.max_new_tokens": 8,
        "rollout.timeout_s": 200,
        "train.timeout_s": 200,
        "checkpoint.every": 0,
        "reward.function": braked(tmp_path, SLOW_S),
        "reward.timeout_s": 60,
        "platform.device": "auto",
    }
    two = {
        "overrides": overrides(
            common | {"run.name": "two", "parallel.nodes": 2, "parallel.rendezvous": f"127.0.0.1:{two_neighbours()}"}
        )
    }
    run = start(api, "counted", two)
    taken = {slots(api)}
    folder = tmp_path / "two"
    other = start(api, "counted", {"overrides": overrides(common | {"run.name": "one"})})
    meanwhile = set()

    def trains():
        taken.add(slots(api))
        meanwhile.add(state(api, other)["type"])
        assert state(api, run)["type"] not in ENDS, state(api, run)
        return any(read_lines(folder / "steps.jsonl"))

    wait_for(trains, "a step on two nodes", 600)
    slow_down(tmp_path, HELD_S)
    cancel(api, run, node_of(api, run, folder))
    slow_down(tmp_path, 0)
    done = len(list(read_lines(folder / "steps.jsonl")))
    # it is there because of the cancel: checkpoint.every is 0
    assert step_of(latest_checkpoint(folder / "checkpoints")) == done < STEPS
    assert meanwhile == {"SCHEDULED"}

    again = start(api, "counted", two | {"resume": True})  # when the other one is through, as it asked first
    assert ended(api, other) == "COMPLETED", state(api, other)
    taken.add(slots(api))
    assert ended(api, again) == "COMPLETED", state(api, again)
    node = node_of(api, again, folder)
    assert state(api, node)["type"] == "COMPLETED", state(api, node)
    wait_for(lambda: not processes(again) and not processes(node), "the end of the processes of both")
    assert taken == {0, 3}  # two ranks and an instance in one go
    assert slots(api) == 0
    for name in ("one", "two"):
        assert [row["step"] for row in read_lines(tmp_path / name / "steps.jsonl")] == list(range(STEPS)), name
    one, resumed = ((tmp_path / name / "policy/model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == resumed
