"""A real Prometheus reads a real run's /metrics, as infra/monitoring sets it up: every expression of the dashboard has
data, and the alert rules are evaluated."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import pytest
import yaml

from engine.wire.access_token import VARIABLE
from support.ports import two_neighbours
from support.runs import ROOT, Tree, base_settings, wait_for, write_config

PROMETHEUS = shutil.which("prometheus")
MONITORING = ROOT / "infra/monitoring"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(PROMETHEUS is None, reason="Debian's package prometheus is not installed"),
]
TOKEN = "a-token-of-a-test"
EVERY = "1s"
READY_S = 400


@pytest.fixture
def run(tiny_model, problems, tmp_path, monkeypatch):
    """The address of a run that goes on, and its processes."""
    monkeypatch.setenv(VARIABLE, TOKEN)
    settings = base_settings(tiny_model, problems, tmp_path) | {"train.steps": 10_000}
    command = [sys.executable, "-m", "engine.orchestrator.launch", "--config", str(write_config(settings, tmp_path))]
    log = tmp_path / "run.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stderr=output, stdout=output, cwd=ROOT)
    try:
        steps = tmp_path / "run/steps.jsonl"
        wait_for(lambda: steps.exists() and steps.read_text().count("\n") > 1, "two steps of the run", READY_S)
        yield (tmp_path / "run/rollout.address").read_text().strip(), process
    finally:
        tree = Tree(process.pid) if process.poll() is None else None
        process.terminate()
        process.wait(60)
        assert tree is None or tree.left() == []


@pytest.fixture
def prometheus(run, tmp_path):
    """Asks Prometheus for an answer: a route of its API and parameters."""
    folder = shutil.copytree(MONITORING, tmp_path / "monitoring")
    config = folder / "prometheus.yaml"
    config.write_text(re.sub(r"(scrape|evaluation)_interval: 15s", rf"\1_interval: {EVERY}", config.read_text()))
    assert config.read_text().count(EVERY) == 2
    (folder / "targets.json").write_text(json.dumps([{"targets": [run[0]], "labels": {"run": "night"}}]))
    (folder / "token").write_text(TOKEN)
    where = f"127.0.0.1:{two_neighbours()}"
    command = [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    with (tmp_path / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={where}"], stdout=log, stderr=log)

    def ask(route, **parameters):
        url = f"http://{where}/api/v1/{route}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]

    def is_ready():
        assert process.poll() is None, (tmp_path / "prometheus.log").read_text()
        try:
            urllib.request.urlopen(f"http://{where}/-/ready", timeout=10).close()
        except OSError:
            return False
        return True

    try:
        wait_for(is_ready, "Prometheus", READY_S)
        yield ask
    finally:
        process.terminate()
        process.wait(60)


def values(ask, query):
    return [(one["metric"], float(one["value"][1])) for one in ask("query", query=query)["result"]]


def test_the_dashboard_has_data_and_the_rules_hold_for_a_real_run(run, prometheus):
    address, process = run
    wait_for(lambda: values(prometheus, 'up{job="metronome"}'), "the first reading", READY_S)
    assert values(prometheus, "up")[0][1] == 1, prometheus("targets")
    assert values(prometheus, "up")[0][0]["run"] == "night"

    board = json.loads((MONITORING / "grafana.json").read_text())
    asked = [target["expr"].replace("$run", ".*") for panel in board["panels"] for target in panel["targets"]]
    wait_for(lambda: values(prometheus, "metronome_step_step"), "a step", READY_S)
    found = {query: values(prometheus, query) for query in asked}
    assert [query for query, rows in found.items() if not rows] == []
    step = found['metronome_step_step{instance=~".*"}'][0][1]
    wait_for(lambda: values(prometheus, "metronome_step_step")[0][1] > step, "the next step", READY_S)
    choice = next(one for one in board["templating"]["list"] if one["name"] == "run")
    metric = re.fullmatch(r"label_values\((\w+), (\w+)\)", choice["query"])
    assert {one[0][metric[2]] for one in values(prometheus, metric[1])} == {address}

    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]

    def states():
        return {one["name"]: one for group in prometheus("rules")["groups"] for one in group["rules"]}

    wait_for(lambda: all(one["health"] == "ok" for one in states().values()), "the rules' first evaluation", READY_S)
    assert {name: one["state"] for name, one in states().items()} == {one["alert"]: "inactive" for one in rules}
    process.terminate()
    process.wait(60)
    wait_for(lambda: states()["MetronomeRunDied"]["state"] == "pending", "the alert of a run that ended", READY_S)
    time.sleep(2)
    others = {name: one["state"] for name, one in states().items() if name != "MetronomeRunDied"}
    assert set(others.values()) == {"inactive"}
