"""What a Prefect server refuses once: a worker keeps its runs, and a deploy changes nothing."""

import json
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from support.flow_runs import get_json, patiently, processes, start
from support.runs import ROOT, wait_for
from support.s3_proxy import FORBID, s3_proxy
from tasks.cluster.prefect_api import post_json

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

POOL = "refused"
FLOW = """
import os, time
from prefect import flow

@flow(name="waits")
def waits(folder: str) -> None:
    with open(f"{folder}/starts", "a") as file:
        file.write(f"{os.getpid()}\\n")
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.1)
"""
DEPLOY_FLOW = """
import sys
from prefect import flow
from tasks.cluster import deploy, watchdog

deploy._make_pools({{{pool!r}: deploy.read_template("cpu")}})
found = flow.from_source(source={folder!r}, entrypoint="waits.py:waits")
found.deploy("waits", work_pool_name={pool!r}, tags=[watchdog.TAG], build=False, push=False, print_next_steps=False)
"""
RESCHEDULE = """
import sys
from uuid import UUID
from tasks.cluster.worker import reschedule_stopped

reschedule_stopped([UUID(int=1), UUID(sys.argv[1])])
"""
CHANGES = """
import sys
from prefect.client.orchestration import get_client
from engine.errors import MetronomeError
from tasks.cluster import alerts, deploy
from tasks.cluster.all_or_nothing import all_or_nothing
from tasks.cluster.deploy import Choices

tree = deploy.read_deployments("infra/recipes/quickstart.toml", [], Choices(name="kept"))
with all_or_nothing(deploy._touched(tree, ["cpu", "new-pool"])), get_client(sync_client=True) as client:
    changed = deploy.read_template("cpu")[1]
    changed["variables"]["properties"]["working_dir"]["default"] = "/elsewhere"
    deploy._make_pools({"new-pool": deploy.read_template("cpu"), "cpu": ("process", changed)})
    client.upsert_global_concurrency_limit_by_name("cpu-slots", 9)
    client.upsert_global_concurrency_limit_by_name("ascend-npus", 9)
    for one in client.read_deployments():
        if one.name.startswith("kept-"):
            for schedule in one.schedules:
                client.delete_deployment_schedule(one.id, schedule.id)
        body = {"parameters": {"recipe": "x"}, "concurrency_limit": 4, "tags": ["a"], "paused": True}
        if one.name in ("kept-pipeline", "kept-nightly", "kept-evaluate"):
            client.request("PATCH", f"/deployments/{one.id}", json=body)
        if one.name == "kept-train":
            client.delete_deployment(one.id)
    for one in client.request("POST", "/automations/filter", json={}).json():
        if one["name"] == "training finished, evaluate (kept)":
            client.request("DELETE", f"/automations/{one['id']}")
        if one["name"] == "metronome: a run is silent":
            client.request("PATCH", f"/automations/{one['id']}", json={"enabled": False})
    alerts.install_alerts(*sys.argv[1:3], 30, sys.argv[3])
    raise MetronomeError("the request was refused")
"""
FIRST = """
from prefect.client.orchestration import get_client
from tasks.cluster.all_or_nothing import Touched, all_or_nothing

made = [("first", "mine", "first"), ("shared", "mine", "shared"), ("shared", "another", "shared")]
queues = [("cpu", "first"), ("cpu", "shared")]
deployments = ["first/mine", "shared/mine"]
touched = Touched(pools=["cpu"], limits=[], deployments=deployments, queues=queues, automations=[], blocks=[])
with all_or_nothing(touched), get_client(sync_client=True) as client:
    for flow, name, queue in made:
        number = client.request("POST", "/flows/", json={"name": flow}).json()["id"]
        body = {"name": name, "flow_id": number, "work_pool_name": "cpu", "work_queue_name": queue}
        client.request("POST", "/deployments/", json=body)
    raise ValueError("the request was refused")
"""
IMPATIENT = """
from flows.main import main
from tasks.cluster import all_or_nothing

all_or_nothing.BACK_S = 3.0
main()
"""
OWN_TIMES = ("id", "created", "updated", "deployment_id", "last_polled", "status", "version_id", "default_queue_id")
"""What the server gives a thing each time anew."""


@pytest.fixture
def proxy(environment):
    """(proxy in front of the Prefect server, the environment of a client of it)."""
    there = urlsplit(environment["PREFECT_API_URL"])
    with s3_proxy(there.hostname, there.port) as between:
        yield between, {**environment, "PREFECT_API_URL": f"{between.url}/api"}


@pytest.mark.slow
def test_a_worker_goes_on_after_refused_requests_and_its_runs_too(environment, proxy, tmp_path):
    between, through = proxy
    api = environment["PREFECT_API_URL"]
    (tmp_path / "waits.py").write_text(FLOW)
    call([sys.executable, "-c", DEPLOY_FLOW.format(pool=POOL, folder=str(tmp_path))], environment)
    log = tmp_path / "worker.log"
    with log.open("w") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "worker", "--pool", POOL],
            env=through,
            cwd=ROOT,
            stdout=output,
            stderr=output,
        )
    try:
        runs = [start(api, "waits", {"folder": str(tmp_path)})]
        wait_for(lambda: (tmp_path / "starts").exists(), "the first run", 120)
        [pid] = (tmp_path / "starts").read_text().split()
        for only, what in (
            ("POST /api/work_pools/", "asking for runs"),
            ("GET /api/deployments/", "starting a run"),
        ):
            between.spoil(FORBID, 0, 1, only=only)
            runs.append(start(api, "waits", {"folder": str(tmp_path)}))
            wait_for(lambda what=what: f"{what} has failed, the worker goes on" in log.read_text(), what, 120)
            begun = len(runs)
            wait_for(
                lambda begun=begun: len((tmp_path / "starts").read_text().split()) == begun, "the run after it", 120
            )
            assert worker.poll() is None
        assert pid in map(str, processes(runs[0]))
        call([sys.executable, "-c", RESCHEDULE, runs[0]], environment)  # after one that the server does not know
        states = patiently(get_json, f"{api}/flow_run_states/?flow_run_id={runs[0]}")
        assert "AwaitingRetry" in [one["name"] for one in states]  # by now the worker may have it again
    finally:
        (tmp_path / "go").touch()
        worker.terminate()
        worker.wait(60)


@pytest.fixture(scope="module")
def deployed(environment):
    """The name of deployments with schedules and alerts."""
    first = ["--name", "kept", "--training", "0 1 * * *", "--timezone", "Asia/Tokyo", "--cpu-slots", "2"]
    call([sys.executable, "-m", "flows.cli", "deploy", *first, "--notify", "http://127.0.0.1:9/old"], environment)
    return "kept"


@pytest.mark.slow
@pytest.mark.parametrize(
    "alerts", [("http://127.0.0.1:9/new", "json", ""), ("http://x.y/", "feishu", "SECabc"), ("off", "", "")]
)
def test_what_a_failed_deploy_has_changed_or_removed_is_put_back(environment, deployed, alerts):
    """Whatever it has done by then: a new pool, other slots, deployments, schedules, triggers and alerts."""
    api = environment["PREFECT_API_URL"]
    before = everything(api)
    done = subprocess.run(
        [sys.executable, "-c", CHANGES, *alerts], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert "MetronomeError: the request was refused" in done.stderr, done.stderr[-3000:]
    assert "Nothing is changed: the server has again what it had before" in done.stderr
    assert everything(api) == before


def test_a_first_deploy_that_fails_leaves_no_flow_and_no_queue_but_those_that_others_use(environment, deployed):
    api = environment["PREFECT_API_URL"]
    before = everything(api)
    done = subprocess.run(
        [sys.executable, "-c", FIRST], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert "Nothing is changed: the server has again what it had before" in done.stderr, done.stderr[-3000:]
    after = everything(api)
    new = {
        kind: [one["name"] for one in after[kind] if one["name"] not in {old["name"] for old in before[kind]}]
        for kind in ("deployments", "flows", "queues")
    }
    assert new == {"deployments": ["another"], "flows": ["shared"], "queues": ["shared"]}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_deploy_that_fails_midway_changes_nothing(environment, deployed, proxy):
    """Another recipe, other schedules, slots and alerts: one request is refused, of each kind that a deploy sends. Then
    the server goes away in the middle: what is left is named, and the same command repairs it."""
    between, through = proxy
    api = environment["PREFECT_API_URL"]
    changes = ["--set", "train.steps=7", "--evaluation", "30 3 * * *", "--cpu-slots", "3"]
    changes += ["--notify", "http://127.0.0.1:9/new"]
    before = everything(api)
    for name, only, number in (
        (deployed, "(POST /api/deployments/|PATCH /api/deployments/[^/]+)$", 4),
        ("fresh", "POST /api/deployments/$", 4),
        (deployed, "PUT /api/automations/", 6),
        ("fresh", "POST /api/automations/$", 0),
    ):
        between.spoil(FORBID, number, number, only=only)
        told = deploy(through, "--name", name, *changes)
        assert len(between.requests) > number, (only, told.stdout[-2000:])
        assert told.returncode != 0
        assert "Nothing is changed: the server has again what it had before" in told.stderr, told.stderr[-3000:]
        assert "Traceback" not in told.stderr
        assert everything(api) == before, (name, only)
    between.spoil("cut", 60)
    told = deploy(through, "--name", deployed, *changes, code=IMPATIENT)
    assert told.returncode != 0
    assert "work pool cpu (the server does not answer)" in told.stderr
    assert "Repair: the same command once more" in told.stderr
    between.heal()
    assert deploy(through, "--name", deployed, *changes).returncode == 0
    there = {one["name"]: one for one in everything(api)["deployments"]}
    assert there["kept-nightly"]["parameters"]["overrides"] == ["train.steps=7"]
    assert there["kept-nightly"]["schedules"] == []
    assert [one["schedule"]["cron"] for one in there["kept-nightly-evaluation"]["schedules"]] == ["30 3 * * *"]


def call(command, environment):
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def deploy(environment, *given, code="from flows.main import main; main()"):
    command = [sys.executable, "-c", code, "deploy", *given]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)


def everything(api):
    """What a deploy can change on the server, without what differs each time."""
    found = {
        kind: [plain(one) for one in patiently(post_json, f"{api}/{path}/filter", {"limit": 200})]
        for kind, path in {
            "pools": "work_pools",
            "deployments": "deployments",
            "automations": "automations",
            "limits": "v2/concurrency_limits",
            "flows": "flows",
            "queues": "work_queues",
        }.items()
    }
    block = "block_types/slug/custom-webhook/block_documents/name/metronome-alerts?include_secrets=true"
    block = patiently(get_json, f"{api}/{block}")
    found["block"] = [block["data"]]
    text = json.dumps(found).replace(block["id"], "that of the block")  # made anew, it has another
    return {kind: sorted(ones, key=json.dumps) for kind, ones in json.loads(text).items()}


def plain(value):
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items() if name not in OWN_TIMES}
    return [plain(part) for part in value] if isinstance(value, list) else value
