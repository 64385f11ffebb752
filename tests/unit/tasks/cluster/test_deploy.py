"""What `metronome deploy` sends to the server, without one; tests/stack has the server."""

import json

import pytest

from engine.config.recipe import load_config
from engine.errors import BadInput
from tasks.cluster import deploy, watchdog
from tasks.cluster.deploy import Choices, read_deployments
from tasks.cluster.watchdog import TAG

RECIPE = "infra/recipes/quickstart.toml"


def deployments(*overrides, recipe=RECIPE, **choices):
    """The deployments by name."""
    return {one["name"]: one for one in read_deployments(recipe, overrides, Choices(**choices))["deployments"]}


def test_choices_reach_the_deployments():
    pools = {"pool": "ascend-train", "rollout_pool": "ascend-rollout"}
    night = {"timezone": "Asia/Shanghai", "training": "30 1 * * *"}
    found = deployments("train.steps=3", recipe="mine.toml", **pools, **night)
    given = [one["parameters"] for name, one in found.items() if name != "join-training"]
    assert {(one["recipe"], *one["overrides"]) for one in given} == {("mine.toml", "train.steps=3")}
    trains = ("pipeline", "nightly", "train", "evaluate", "join-training")
    wanted = dict.fromkeys(trains, "ascend-train") | {"prepare": "cpu", "convert": "cpu"}
    assert {name: one["work_pool"]["name"] for name, one in found.items()} == wanted | {
        "serve-rollouts": "ascend-rollout"
    }
    [nightly] = found["nightly"]["schedules"]
    assert (nightly["cron"], nightly["timezone"], nightly["active"]) == ("30 1 * * *", "Asia/Shanghai", True)
    assert deployments()["nightly"]["schedules"] == []  # what the server has stays
    assert found["nightly"]["parameters"]["continue_from"] == "nightly"
    assert {name for name, one in found.items() if TAG in one["tags"]} == {*trains}  # resumed after a crash
    # a limit on the queue `default` must not hold back the nodes of a run that has begun
    queues = {name: one["work_pool"].get("work_queue_name", "default") for name, one in found.items()}
    assert queues == dict.fromkeys(found, "default") | {"join-training": "nodes", "serve-rollouts": "nodes"}
    assert "host" not in found["serve-rollouts"]["parameters"]  # loopback
    pods = deployments(rollout_pool="kubernetes-cuda")["serve-rollouts"]
    assert pods["parameters"]["host"] == "0.0.0.0"  # the run is another pod


def test_scheduled_runs_take_their_instances_from_the_rollout_pool():
    """Nobody fills in a form for them; the evaluation that follows a training takes as many as that one did."""
    for count, wanted in ((4, ("pipeline", "nightly", "train", "evaluate")), (0, ())):
        found = deployments(on_rollout_pool=count)
        given = {name: one.get("parameters", {}).get("on_rollout_pool") for name, one in found.items()}
        assert {name: there for name, there in given.items() if there is not None} == dict.fromkeys(wanted, count)
    [trigger] = found["evaluate"]["triggers"]
    assert "event.payload.on_rollout_pool" in json.dumps(trigger["parameters"]["on_rollout_pool"])


def test_every_entrypoint_is_a_flow_with_these_parameters():
    from prefect.flows import load_flow_from_entrypoint

    for one in deployments().values():
        flow = load_flow_from_entrypoint(one["entrypoint"], use_placeholder_flow=False)
        given = one.get("parameters", {}) | {
            name: value for trigger in one.get("triggers", ()) for name, value in trigger["parameters"].items()
        }
        assert set(given) <= set(flow.parameters.properties), one["name"]
        assert all(field.get("description") for field in flow.parameters.properties.values()), one["name"]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (Choices(timezone="Mars/Olympus"), "Mars/Olympus"),
        (Choices(training="0 25 * * *"), "--training"),
        (Choices(training="every day"), '--training "every day": not a cron line'),
        (Choices(name="a/b"), "--name a/b"),
        (Choices(npus=-1), "--npus -1"),
        (Choices(cuda_devices=-1), "--cuda-devices -1"),
        (Choices(on_rollout_pool=-2), "--on-rollout-pool -2"),
    ],
)
def test_bad_choices_are_refused(choices, said):
    with pytest.raises(BadInput, match=said):
        read_deployments(RECIPE, [], choices)


def test_a_named_deploy_has_deployments_events_and_policies_of_its_own(monkeypatch):
    from tasks.tracking.registered_policies import registered_name

    found = deployments(name="math")
    assert {"math-pipeline", "math-nightly", "math-serve-rollouts"} <= set(found)
    assert all("math" in one["tags"] for one in found.values())
    for one in (found["math-evaluate"], deployments()["evaluate"]):
        assert one["triggers"][0]["match"]["metronome.evaluation"] == one["name"]
    env = found["math-nightly"]["work_pool"]["job_variables"]["env"]
    assert env["METRONOME_DEPLOY"] == "math"
    config = load_config(RECIPE)
    assert registered_name(RECIPE, config) == "metronome-quickstart"
    monkeypatch.setenv("METRONOME_DEPLOY", env["METRONOME_DEPLOY"])
    assert registered_name(RECIPE, config) == "metronome-math-quickstart"


def test_flow_runs_get_the_addresses_of_the_shell_but_no_secret(monkeypatch, tmp_path):
    """Pods do not see this machine's loopback, and the pool's own file counts."""

    def env(**choices):
        return deployments(**choices)["nightly"]["work_pool"]["job_variables"]["env"]

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert env() == {"MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"}
    assert env(pool="kubernetes-cuda") == {}
    (tmp_path / "pools.toml").write_text('[cpu.variables.env]\nMLFLOW_TRACKING_URI = "http://pool:5000"\n')
    assert env(pools=tmp_path / "pools.toml") == {}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:word@mlflow:5000")
    assert env() == {}


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "An error.\nTraceback (most recent call last):\n  File x\n    y\nStatusError: 403\nfor a URL\n",
            "StatusError: 403\nfor a URL",
        ),
        ("no pool\n  of this name\n", "no pool\n  of this name"),
        ("", ""),
    ],
)
def test_of_a_traceback_only_the_error_is_told(output, reason):
    assert deploy._reason(output) == reason


@pytest.mark.parametrize(
    ("seen", "said"),
    [(12.4, "resumed by the watchdog, which looked 12 s ago"), (400.0, "NOT resumed: no"), (None, "NOT resumed: no")],
)
def test_a_deploy_says_whether_anybody_resumes_crashed_runs(monkeypatch, seen, said):
    monkeypatch.setattr(watchdog, "last_seen", lambda: seen)
    assert deploy._who_resumes().startswith(said)
