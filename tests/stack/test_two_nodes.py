"""Trainer ranks on two nodes through Prefect: two workers of one pool stand for two machines. Another run waits meanwhile."""

import subprocess
import sys

import pytest
from conftest import ROOT, overrides, wait_for
from flow_runs import patiently, processes, start, state
from ports import two_neighbours

from engine.run_folder import read_lines
from tasks.companions import NOTES
from tasks.services import post

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1200)]

POOL = "pair"
ENDS = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
WORKER = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/stack'}"}
DEPLOY = f"""
from prefect.client.orchestration import get_client
from tasks import deploy
from tasks.deploy import Choices

tree = deploy.deployments("infra/recipes/quickstart.toml", [], Choices(pool="{POOL}"))
train = next(one for one in tree["deployments"] if one["name"] == "train")
node = next(one for one in tree["deployments"] if one["name"] == "join-training")
tree["deployments"] = [train | {{"name": "counted", "entrypoint": "counted.train"}}, node]
deploy._make_pools({{"{POOL}": deploy.template("cpu")}})
deploy._deploy(tree)
with get_client(sync_client=True) as client:
    client.upsert_global_concurrency_limit_by_name("ascend-npus", 3)
"""
ONE_RUN = ["-m", "prefect", "work-queue", "set-concurrency-limit", "default", "1", "--pool", POOL]
"""Two nodes are enough for one run on two nodes (docs/operations.md)."""


@pytest.fixture(scope="module")
def api(services, environment):
    """The API's URL once training and further nodes are deployed, there are three NPUs, and two workers for one run at a time."""
    for command in (["-c", DEPLOY], ONE_RUN):
        done = subprocess.run([sys.executable, *command], env=environment | WORKER, cwd=ROOT, capture_output=True, text=True,
                              timeout=300)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    for name in ("node-0", "node-1"):
        services.worker(POOL, name, WORKER, limit=1)
    return environment["PREFECT_API_URL"]


def slots(api):
    """How many of the limit's slots are taken."""
    [limit] = [one for one in patiently(post, f"{api}/v2/concurrency_limits/filter", {}) if one["name"] == "ascend-npus"]
    return limit["active_slots"]


def worker_of(api, run):
    """Name of the worker that a flow run was on."""
    def read():
        asked = {"filter": {"event": {"name": ["prefect.worker.submitted-flow-run"]},
                            "related": {"id": [f"prefect.flow-run.{run}"]}}}  # fmt: skip
        [event] = post(f"{api}/events/filter", asked)["events"]
        return event["resource"]["prefect.resource.name"]

    return patiently(read)


def test_a_run_on_two_nodes_and_one_that_waits(api, settings, tmp_path):
    """The second run would take the worker of the first one's second node, and wait there for NPUs."""
    common = settings | {"train.steps": 2, "parallel.data": 2, "train.consume": "prompt_order", "rollout.deterministic": True,
                         "rollout.max_new_tokens": 8, "rollout.timeout_s": 200, "train.timeout_s": 200,
                         "platform.device": "auto"}  # fmt: skip
    two = common | {"run.name": "two", "parallel.nodes": 2, "parallel.rendezvous": f"127.0.0.1:{two_neighbours()}"}
    run, taken, folder = start(api, "counted", {"overrides": overrides(two)}), {slots(api)}, tmp_path / "two"
    second, meanwhile = start(api, "counted", {"overrides": overrides(common | {"run.name": "one"})}), set()

    def ended():
        taken.add(slots(api))
        waiting = state(api, second)["type"]
        if state(api, run)["type"] in ENDS:  # the second may begin now
            return True
        meanwhile.add(waiting)
        return False

    wait_for(ended, "the end of the run", 600)
    assert state(api, run)["type"] == "COMPLETED", state(api, run)
    [node] = [row["flow_run_id"] for row in read_lines(folder / NOTES)]
    assert state(api, node)["type"] == "COMPLETED", state(api, node)
    assert {worker_of(api, run), worker_of(api, node)} == {"node-0", "node-1"}
    assert meanwhile == {"SCHEDULED"}
    wait_for(lambda: not processes(run) and not processes(node), "the end of the processes of both")

    wait_for(lambda: state(api, second)["type"] in ENDS, "the end of the run that waited", 300)
    assert state(api, second)["type"] == "COMPLETED", state(api, second)
    assert taken == {0, 3}  # two ranks and an instance in one go
    assert slots(api) == 0
    one, other = ((tmp_path / name / "policy/model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == other
