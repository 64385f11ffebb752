"""A page in a real Chromium attacks a run, `metronome serve`, `metronome service`, and Prefect's server and the bucket
of `make services`: it reads nothing and moves nothing. `support.browser` has the page and its ways to send.
"""

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from types import SimpleNamespace

import pytest

from engine.client.service import ServiceClient
from engine.run.process import LIFELINE, hold_lifeline
from engine.wire.messages import CONTENT_TYPE, PROTOCOL, PROTOCOL_HEADER, PutPrompts, pack
from support.brake import braked, slow_down
from support.browser import STRANGER, OpenServer, attack, attempt, chromium, open_server
from support.fuzz_routes import Server
from support.ports import free_port
from support.runs import ROOT, base_settings, overrides, wait_for, write_config
from support.stack import Services
from support.whole_runs import run, same, steps, weights
from tasks.cluster.prefect_api import CLIENT_AUTH, post_json

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
TOKEN = "token-that-was-stolen"
"""The pages send it where a browser lets them, so that the token is not all that keeps them out."""
SMALL = {
    "model.path": str(ROOT / "data/quickstart_model"),
    "rollout.group_size": 2,
    "rollout.deterministic": True,
    "rollout.timeout_s": 600,
    "reward.timeout_s": 600,
    "train.prompts_per_step": 4,
    "train.timeout_s": 600,
    "train.consume": "prompt_order",
}
KEPT = {"Bucket": "metronome", "Key": "kept"}
RIGHT = {"Authorization": f"Bearer {TOKEN}"}
POISON = (
    ("/begin_weight_update", {}),
    ("/update_weights", {"update_info": {"transport": "base", "perturb": [5, 9, 20, 33]}}),
    ("/finish_weight_update", {"weight_version": 0}),
)


def as_json(url, route, body):
    headers = RIGHT | {"Content-Type": "application/json"}
    return attempt("POST", url + route, json.dumps(body).encode(), **headers)


def of_an_instance(url):
    ask = {"prompt": [5, 9, 20], "max_tokens": 4}
    read = [attempt("GET", url + route, **RIGHT) for route in ("/", "/load", "/metrics")]
    return [*read, as_json(url, "/v1/completions", ask), *(as_json(url, *one) for one in POISON)]


def of_a_plane(url, name):
    headers = RIGHT | {"Content-Type": CONTENT_TYPE, PROTOCOL_HEADER: str(PROTOCOL)}
    joins = {"protocol": 1, "name": "stranger", "url": "http://127.0.0.1:9"}
    return [
        *(attempt("GET", url + route, **RIGHT) for route in ("/status", "/metrics")),
        attempt("POST", f"{url}/ask", pack(PutPrompts(step=0)), **headers),
        as_json(url, "/join", joins),
        as_json(url, "/leave", {"name": name}),
    ]


def of_the_services(environment):
    prefect = environment["PREFECT_API_URL"]
    mlflow = f"{environment['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/experiments"
    typed = {"Content-Type": "application/json"}
    return (
        [
            attempt("GET", f"{prefect}/admin/settings"),
            attempt("POST", f"{prefect}/flows/", b'{"name":"stranger"}', **typed),
            attempt("POST", f"{prefect}/flows/filter", b"{}", **typed),
        ],
        [
            attempt("GET", f"{mlflow}/search?max_results=100"),
            attempt("POST", f"{mlflow}/create", b'{"name":"stranger"}', **typed),
        ],
    )


class Attacked:
    """A process under attack that is asked as its owner would."""

    def __init__(self, address):
        host, port = address.split(":")
        self.url = f"http://{address}"
        self.asked = Server(host, int(port), TOKEN, deadline_s=60)

    def get(self, route):
        status, reply = self.asked.call("GET", route)
        assert status == 200, reply
        return json.loads(reply)

    def instances(self):
        """Their names with what an attack would change."""
        known = self.get("/status")["instances"]
        return {one["name"]: (one["state"], one["version"], one["restarts"]) for one in known}

    def instance(self):
        """Its only one."""
        (one,) = self.get("/status")["instances"]
        return Attacked(one["url"].removeprefix("http://"))


@contextlib.contextmanager
def started(module, *arguments):
    environment = os.environ | {"METRONOME_TOKEN": TOKEN, LIFELINE: hold_lifeline()}
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def sets(settings):
    return [part for one in overrides(settings) for part in ("--set", one)]


def address_of(folder, process):
    wait_for(lambda: (folder / "rollout.address").exists() or process.poll() is not None, folder.name, 300)
    return Attacked((folder / "rollout.address").read_text().strip())


@pytest.fixture
def made(problems, tmp_path):
    return base_settings(SMALL["model.path"], problems, tmp_path) | SMALL | {"reward.function": braked(tmp_path, 0)}


@pytest.fixture
def world(made, tmp_path):
    """All that is attacked: a run in the middle of its first step, an instance, a service, and the two servers."""
    chromium()  # skips before anything is started
    run(made | {"run.name": "alone"}, tmp_path, timeout_s=400)
    slow_down(tmp_path, 500)
    with contextlib.ExitStack() as stack:
        port = free_port()
        serving = ["serve", "--port", str(port), "--model", made["model.path"], *sets(made)]
        attacked = [
            stack.enter_context(started("engine.orchestrator.launch", "--config", str(write_config(made, tmp_path)))),
            stack.enter_context(started("flows.cli", "service", *sets(made | {"run.name": "service"}))),
            stack.enter_context(started("flows.cli", *serving)),
        ]
        services = stack.enter_context(Services(tmp_path / "services", s3=False))
        planes = [address_of(tmp_path / name, one) for name, one in zip(("run", "service"), attacked, strict=False)]
        serve = Attacked(f"127.0.0.1:{port}")
        wait_for(lambda: answers(serve, "/load"), "metronome serve", 300)
        ServiceClient(
            planes[1].url.removeprefix("http://"), timeout_s=300, token=TOKEN
        ).close()  # waits for its engines
        wait_for(lambda: planes[0].get("/status")["version"] == 0, "the run's first step", 300)
        yield SimpleNamespace(processes=attacked, run=planes[0], service=planes[1], serve=serve, services=services)


def answers(one, route):
    with contextlib.suppress(OSError):
        return one.get(route)


def test_the_attack_gets_through_to_a_server_that_takes_everybody(tmp_path):
    """The control: without a guard each request arrives, and the rebound page reads the answers."""
    chromium()
    with open_server() as server:
        url = f"http://127.0.0.1:{server.port}"
        plan = [[attempt("GET", f"{url}/read", **RIGHT), as_json(url, "/leave", {"name": "instance-0"})]]
        pages = attack(tmp_path, plan)
    bodies = {body for method, path, body, _ in server.taken if (method, path) == ("POST", "/leave")}
    assert b'{"name": "instance-0"}' in bodies
    assert {"instance-0"} == {json.loads(body)["name"] for body in bodies}  # the form's has an x, too
    assert len(bodies) == 2
    gets = {(one["how"], one["ended"]) for one in pages["address"] if one["method"] == "GET"}
    assert ("no-cors", "opaque") in gets
    assert {("cors", "error"), ("headers", "error"), ("script", "loaded")} <= gets
    assert [one for name in ("address", "name") for one in pages[name] if one["text"]] == []
    rebound = pages[f"rebound {server.port}"]
    read = {one["how"] for one in rebound if one["text"] == OpenServer.SECRET}
    assert {"no-cors", "cors", "headers", "frame", "form"} <= read
    assert RIGHT["Authorization"] in {given for *_, given in server.taken}


def test_a_page_reads_nothing_and_moves_nothing(world, made, tmp_path):
    environment = world.services.environment
    instances = [world.run.instance(), world.service.instance(), world.serve]
    before = [one.asked.state() for one in instances]
    held = [plane.instances() for plane in (world.run, world.service)]
    service = world.service.get("/status")
    plan = [
        of_a_plane(world.run.url, *held[0]),
        of_a_plane(world.service.url, *held[1]),
        *(of_an_instance(one.url) for one in instances),
        *of_the_services(environment),
    ]
    pages = attack(tmp_path / "profile", plan)

    tried = [one for answers in pages.values() for one in answers]
    print(f"{len(tried)} requests of {len(pages)} pages")
    read = [one for one in tried if one["text"]]
    assert [one for one in tried if one["ended"] == "open" or (one["how"], one["ended"]) == ("script", "loaded")] == []
    for one in read:  # a refusal is what a page of the attacked host name reads, and nothing else
        assert f"//{STRANGER}:" in one["url"], one
        assert one.get("status", 403) in (401, 403), one
        assert len(one["text"]) < 300, one
    assert [one for name in ("address", "name") for one in pages[name] if one["text"]] == []

    assert [plane.instances() for plane in (world.run, world.service)] == held
    assert world.service.get("/status")["steps"] == service["steps"]
    assert [one.asked.state() for one in instances] == before
    flows = post_json(f"{environment['PREFECT_API_URL']}/flows/filter", {}, environment[CLIENT_AUTH])
    assert "stranger" not in {one["name"] for one in flows}
    with urllib.request.urlopen(
        f"{environment['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/experiments/search?max_results=100"
    ) as reply:
        assert "stranger" not in {one["name"] for one in json.load(reply)["experiments"]}

    slow_down(tmp_path, 0)
    assert world.processes[0].wait(200) == 0
    assert len(steps(tmp_path, "run")) == made["train.steps"]
    assert same(weights(tmp_path, "run"), weights(tmp_path, "alone"))

    # the same requests of their owner do move what they name
    for route, body in POISON:
        assert world.serve.asked.call("POST", route, body)[0] == 200, route
    assert world.serve.asked.state() != before[-1]
    assert world.service.asked.call("POST", "/leave", {"name": next(iter(held[1]))})[0] == 200
    wait_for(lambda: world.service.instances() != held[1], "the instance to leave", 30)
