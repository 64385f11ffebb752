"""A team's day on real servers: deploy, start a training, watch it end, find everything where it belongs."""

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from zoneinfo import ZoneInfo

import pytest

from engine.model.shape import content_hash
from engine.run.files import read_lines
from support.brake import braked
from support.flow_runs import patiently, processes, start, state
from support.listening import listening
from support.runs import ROOT, overrides, wait_for
from support.stack import BUCKET
from tasks.cluster import alerts
from tasks.cluster.prefect_api import post_json
from tasks.cluster.watchdog import PENDING_S

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

RUN = [sys.executable, "-m", "prefect", "--no-prompt", "deployment", "run"]
METRONOME = [sys.executable, "-m", "flows.cli"]


def call(command, environment, timeout=300, cwd=ROOT):
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def train(environment, deployment, timeout, **parameters):
    """Run a deployment to its end with some parameters, as Prefect's command does."""
    given = [part for name, value in parameters.items() for part in ("--param", f"{name}={json.dumps(value)}")]
    call([*RUN, deployment, *given, "--watch"], environment, timeout)


def flow_runs(api, deployment):
    found = {one["name"]: one["id"] for one in post_json(f"{api}/deployments/filter", {})}
    rows = post_json(
        f"{api}/flow_runs/filter", {"deployments": {"id": {"any_": [found[deployment]]}}, "sort": "START_TIME_DESC"}
    )
    return {row["id"]: row for row in rows}


def wait_for_runs(api, deployment, state, timeout_s=240.0, of=None):
    """The first flow run of a deployment in a state; a run that ends otherwise fails the test with Prefect's reason.

    `of`: only those with this name as their parameter `run`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        rows = [row for row in flow_runs(api, deployment).values() if of is None or row["parameters"].get("run") == of]
        for row in rows:
            if row["state_type"] == state:
                return row
            assert row["state_type"] not in ("FAILED", "CRASHED", "CANCELLED"), row["state"]
        assert time.monotonic() < deadline, (
            f"waited {timeout_s:.0f} s for {deployment} {state}: {[r['state'] for r in rows]}"
        )
        time.sleep(0.5)


@pytest.fixture(scope="module")
def messages():
    """(address, bodies) of a webhook and of what it has received."""
    received = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):  # noqa: N802
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", received
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def deployed(start_worker, environment, tiny_model, problems, tmp_path_factory, messages):
    """(API URL, overrides, folder) once a very small recipe is deployed, twice, and a worker serves it."""
    folder = tmp_path_factory.mktemp("runs")
    small = {
        "run.output": str(folder),
        "model.path": str(tiny_model),
        "data.train": str(problems),
        "data.heldout": str(problems),
        "reward.function": f"{ROOT / 'tests/support/rewards.py'}:even",
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 8,
        "rollout.max_context": 64,
        "train.steps": 2,
        "train.prompts_per_step": 4,
        "evaluate.problems": 4,
        "evaluate.max_new_tokens": 8,
        "checkpoint.every": 1,
        "checkpoint.path": f"s3://{BUCKET}/checkpoints",
    }
    sets = [part for override in overrides(small) for part in ("--set", override)]
    for _ in range(2):
        said = call(
            [*METRONOME, "deploy", *sets, "--schedule", "--timezone", "Asia/Shanghai", "--npus", "16"],
            environment | {"METRONOME_NOTIFY": messages[0]},
        )
        assert messages[0] not in said
        assert "nightly" in said
        assert "Asia/Shanghai" in said
    start_worker("cpu", "day")
    return environment["PREFECT_API_URL"], overrides(small), folder


@pytest.mark.nightly
def test_a_second_deploy_makes_nothing_twice(deployed, environment):
    api, *_ = deployed
    deployments = [one["name"] for one in post_json(f"{api}/deployments/filter", {})]
    assert sorted(deployments) == sorted(set(deployments))
    assert len(deployments) == 8
    automations = [one["name"] for one in post_json(f"{api}/automations/filter", {})]
    assert sorted(automations) == sorted(set(automations))
    [nightly] = [one for one in post_json(f"{api}/deployments/filter", {}) if one["name"] == "nightly"]
    assert len(nightly["schedules"]) == 1
    assert nightly["schedules"][0]["schedule"]["timezone"] == "Asia/Shanghai"
    at_once = {
        one["name"]: one["global_concurrency_limit"]["limit"]
        for one in post_json(f"{api}/deployments/filter", {})
        if one["global_concurrency_limit"]
    }
    assert at_once == {"nightly": 1, "evaluate": 1}
    assert nightly["concurrency_options"]["collision_strategy"] == "ENQUEUE"  # the next one waits, it is not cancelled
    assert nightly["concurrency_options"]["grace_period_seconds"] > PENDING_S
    limits = post_json(f"{api}/v2/concurrency_limits/filter", {})
    assert {one["name"]: one["limit"] for one in limits}["ascend-npus"] == 16
    _check_two_names(api, environment)


def _check_two_names(api, environment):
    """A second name leaves the first alone, and a deploy without a schedule leaves its own earlier one."""

    def crons():
        found = post_json(f"{api}/deployments/filter", {})
        return {one["name"]: [each["schedule"]["cron"] for each in one["schedules"]] for one in found}

    def zones():
        found = post_json(f"{api}/deployments/filter", {})
        return {each["schedule"]["timezone"] for one in found for each in one["schedules"] if "other" in one["name"]}

    before = crons()
    other = [*METRONOME, "deploy", "--name", "other"]
    said = call([*other, "--schedule", "--timezone", "Asia/Tokyo"], environment)
    assert "0 22 * * * Asia/Tokyo" in said
    assert "runs on a CPU NOT counted (--cpu-slots N)" in said
    assert crons()["other-nightly"] == ["0 22 * * *"]
    said = call([*other, "--training", "30 1 * * *"], environment)
    assert "30 1 * * * Asia/Tokyo" in said  # kept, since no zone is given
    bad = subprocess.run(
        [*other, "--training", "0 25 * * *"], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert (bad.returncode, "--training" in bad.stderr) == (2, True)
    said = call([*other, "--set", "train.steps=6"], environment)
    assert "30 1 * * * Asia/Tokyo" in said
    assert crons() == {**before, **{f"other-{name}": [] for name in before}, "other-nightly": ["30 1 * * *"]}
    assert zones() == {"Asia/Tokyo"}


def test_the_form_of_a_deployment(deployed):
    api, *_ = deployed
    [pipeline] = [one for one in post_json(f"{api}/deployments/filter", {}) if one["name"] == "pipeline"]
    schema = pipeline["parameter_openapi_schema"]
    assert schema["properties"]["continue_from"]["enum"] == ["base", "nightly", "latest", "champion"]
    assert all(field.get("description") for field in schema["properties"].values()), schema["properties"]
    settings = schema["definitions"]["Settings"]["properties"]
    assert all(field["description"] and field["title"] for field in settings.values())
    assert {"type": "integer", "exclusiveMinimum": 0} in settings["steps"]["anyOf"]
    assert {field["default"] for field in settings.values()} == {None}  # as in the recipe or its rows of overrides
    assert {"train.steps=2", "rollout.group_size=4"} <= set(pipeline["parameters"]["overrides"])
    assert settings["mode"]["anyOf"][0]["enum"] == ["sync", "periodic", "one_step_off", "bounded"]


def test_the_scheduler_shows_tomorrows_nightly_run(deployed):
    api, *_ = deployed
    deadline = time.monotonic() + 90
    while not (rows := flow_runs(api, "nightly")):
        assert time.monotonic() < deadline, "waited 90 s for the scheduler"
        time.sleep(1)
    times = sorted(datetime.fromisoformat(row["expected_start_time"]) for row in rows.values())
    local = [one.astimezone(ZoneInfo("Asia/Shanghai")) for one in times]
    assert {(one.hour, one.minute) for one in local} == {(22, 0)}
    assert times[0] - datetime.now(UTC) <= timedelta(days=1)
    assert times[1] - times[0] == timedelta(days=1)


def test_a_run_from_the_form_to_its_evaluation(deployed, environment, tiny_model, messages):
    api, _, folder = deployed
    refused = start(api, "prepare", {"overrides": ["foo=bar"]})  # it fails while the other trains
    with listening() as seen:
        train(environment, "metronome/pipeline", 400, settings={"name": "day", "learning_rate": 0.001})
        flow_run = wait_for_runs(api, "pipeline", "COMPLETED")["id"]
    _check_sockets(seen)
    steps = [json.loads(line) for line in (folder / "day/steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [0, 1]
    assert steps[0]["learning_rate"] == 0.001
    evaluations = [json.loads(line) for line in (folder / "day/evaluations.jsonl").read_text().splitlines()]
    assert [row["weight_version"] for row in evaluations] == [0, 2]  # the pipeline's own: the same is not sampled again
    run = _check_mlflow(environment["MLFLOW_TRACKING_URI"], folder, tiny_model)
    assert run.data.tags["prefect.flow_run_id"] == flow_run  # the training's, also after the evaluation
    _check_artifacts(api, flow_run, run)
    assert flow_runs(api, "pipeline")[flow_run]["name"] == "day"
    assert "day" not in [row["parameters"].get("run") for row in flow_runs(api, "evaluate").values()]  # it has its own
    story = "\n".join(_logs(api, flow_run))
    for line in ("prepare data ...", "evaluate     ", "train        1/2 steps", "train        2 steps", "Run day\n"):
        assert line in story, line
    assert "\x1b" not in story
    _check_s3(environment, folder)
    finished = _message(messages, "Metronome: day has finished")
    for part in ("2 steps; reward", "avg@1 ", "version 1 of ", "champion: ", f"/runs/flow-run/{flow_run}"):
        assert part in finished
    assert finished.endswith(f'metronome logs "{(folder / "day").resolve()}"')
    failed = _message(messages, " has failed")
    assert "foo" in failed
    assert f"/runs/flow-run/{refused}" in failed
    assert failed.endswith("metronome runs")  # it has no folder


def _message(messages, subject):
    """The body of the message whose subject ends so, once it has come."""

    def found():
        return [one["body"] for one in messages[1] if one["subject"].endswith(subject)]

    wait_for(found, f"the message {subject}", 120)
    [body] = found()
    return body


def _check_sockets(seen):
    """Of the servers, of the worker, and of all that the flows start."""
    for part in ("prefect worker start", "orchestrator.launch", "trainer.rank", "instance.embedded"):
        assert any(part in name for name in seen.processes), (part, seen.processes)
    for part in ("prefect", "mlflow", "moto.server", "orchestrator.launch", "instance.embedded"):
        assert any(part in name for name in seen.sockets.values()), (part, seen.sockets)
    assert seen.open_ones == {}


@pytest.fixture
def latest(deployed, environment):
    """The number of the newest registered policy. A run makes the first one, if no test before it has."""

    def versions():
        return [int(one.version) for one in _registered(environment["MLFLOW_TRACKING_URI"])]

    if not versions():
        train(environment, "metronome/pipeline", 400, settings={"name": "first", "learning_rate": 0.001})
    return max(versions())


@pytest.mark.nightly
def test_instances_of_the_rollout_pool_train_and_evaluate_a_run(deployed, environment, latest):
    """The pipeline starts no instance itself: without those that the pool's worker joins
    to it there is not one response."""
    api, _, folder = deployed
    [pipeline] = [one for one in post_json(f"{api}/deployments/filter", {}) if one["name"] == "pipeline"]
    sets = ["rollout.instances=0", "rollout.wait_s=150", "rollout.deterministic=true"]
    train(
        environment,
        "metronome/pipeline",
        500,
        settings={"name": "pooled", "learning_rate": 0.01},
        on_rollout_pool=1,
        continue_from="latest",
        overrides=[*pipeline["parameters"]["overrides"], *sets],
    )
    pooled = folder / "pooled"
    assert len((pooled / "steps.jsonl").read_text().splitlines()) == 2
    # the policy that the run before it registered
    assert f"metronome-quickstart-problems-{latest}" in (pooled / "config.toml").read_text()
    evaluations = list(read_lines(pooled / "evaluations.jsonl"))
    assert [row["weight_version"] for row in evaluations] == [0, 2]
    # the run's seed, 0, plus the number of the version that it went on from
    assert evaluations[1]["protocol"]["run.seed"] == latest
    before, after = (
        [one["text"] for problem in read_lines(pooled / row["table"]) for one in problem["responses"]]
        for row in evaluations
    )
    assert len(before) == len(after) > 0
    assert before != after  # with the same seeds: the instances held the trained policy
    assert not list((pooled / "logs").glob("instance-*"))  # none was started beside the trainer
    _instances_have_ended(api, 3)  # for two evaluations and the training


@pytest.mark.nightly
def test_a_training_is_evaluated_by_itself(deployed, environment):
    """Of the flow `train`, which does not evaluate."""
    api, _, folder = deployed
    train(environment, "train/train", 400, settings={"name": "trained"})
    wait_for_runs(api, "train", "COMPLETED")
    wait_for_runs(api, "evaluate", "COMPLETED", of="trained")
    [evaluation] = read_lines(folder / "trained/evaluations.jsonl")
    assert evaluation["weight_version"] == 2
    assert evaluation["model"] == str((folder / "trained/policy").resolve())


def _instances_have_ended(api, count):
    def states():
        return [row["state_type"] for row in flow_runs(api, "serve-rollouts").values()]

    wait_for(lambda: set(states()) <= {"CANCELLING", "CANCELLED"}, "the end of the instances", 60)
    assert len(states()) == count


@pytest.mark.nightly
def test_a_cancelled_run_ends_its_instances_on_the_rollout_pool(deployed, tmp_path):
    api, given, folder = deployed
    before = flow_runs(api, "serve-rollouts").keys()
    slow = overrides(
        {"reward.function": braked(tmp_path, 1.0), "train.steps": 500, "rollout.instances": 0, "rollout.wait_s": 99}
    )
    run = start(api, "pipeline", {"settings": {"name": "ended"}, "on_rollout_pool": 1, "overrides": [*given, *slow]})

    def trains():
        assert state(api, run)["type"] not in ("FAILED", "CRASHED", "COMPLETED"), state(api, run)
        return any(read_lines(folder / "ended/steps.jsonl"))

    wait_for(trains, "a step with instances of the rollout pool", 240)
    began = flow_runs(api, "serve-rollouts").keys() - before
    assert len(began) == 2  # the first evaluation's has ended, or is about to
    assert processes(run)
    assert any(map(processes, began))
    patiently(post_json, f"{api}/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    wait_for(lambda: not any(map(processes, (run, *began))), "the end of all processes", 60)
    wait_for(
        lambda: {state(api, one)["type"] for one in (run, *began)} == {"CANCELLED"}, "the state CANCELLED of all", 60
    )


def test_a_deploy_leaves_no_address_of_an_earlier_one_on_the_server(deployed, environment, messages):
    """Alerts have one block; the last of these are those that the fixture has made."""
    api, *_ = deployed
    code = "import sys; from tasks.cluster import alerts; alerts.install_alerts(*sys.argv[1:3], 30)"

    def blocks(*given):
        call([sys.executable, "-c", code, *given], environment)
        found = post_json(f"{api}/block_documents/filter", {"block_documents": {"is_anonymous": {"eq_": False}}})
        told = [one["name"] for one in post_json(f"{api}/automations/filter", {}) if " alert: " in one["name"]]
        return {one["name"] for one in found if "alerts" in one["name"]}, len(told)

    assert blocks("https://open.feishu.cn/open-apis/bot/v2/hook/x", "feishu") == ({alerts.BLOCK}, 5)
    assert blocks("off", "") == (set(), 0)
    assert blocks(messages[0], "json") == ({alerts.BLOCK}, 5)


def test_the_devices_of_a_run_are_taken_in_one_go(deployed, environment):
    """16 slots: one that holds 12 leaves none for one that wants 6, and that one waits with nothing in its hands. One
    that wants more than there are is told so."""
    code = """
from engine.errors import BadInput, DeadlineError
from tasks.cluster.devices import hold_devices
with hold_devices(12):
    try:
        with hold_devices(6, wait_s=3):
            print("both")
    except DeadlineError as error:
        print(error)
    with hold_devices(4, wait_s=30):
        print("the rest")
with hold_devices(1, "cuda-devices"), hold_devices(1, "cuda-devices"):
    print("not counted, as nobody has made the limit")
for wrong in ((17,), (1, "another")):
    try:
        with hold_devices(*wrong):
            print("held")
    except BadInput as error:
        print(error)
"""
    said = call([sys.executable, "-c", code], environment).splitlines()
    assert said[:2] == ["6 slots of the limit ascend-npus were not free within 3 s", "the rest"]
    assert said[2] == "not counted, as nobody has made the limit"
    assert [line[: line.index(":")] for line in said[3:]] == [
        "this run needs 17 slots of Prefect's limit ascend-npus, which has fewer in total",
        "Prefect has no limit another, of which this run takes 1",
    ]


def test_the_first_deploy_on_a_machine_with_cuda_devices_counts_them(environment, tmp_path):
    """A folder stands for the machine's device files; a second machine has fewer. What the server says is what its own
    client has set."""
    code = """
import sys
from pathlib import Path
from prefect.client.orchestration import get_client
from tasks.cluster import deploy, devices
from tasks.cluster.deploy import Choices

def told(count, kind="process", **choices):
    devices.CUDA_FILES = Path(sys.argv[1]) / str(count)
    said = deploy._set_limits(Choices(**choices), kind)
    print(next(part for part in said.split(", ") if "cuda" in part.lower()))

with get_client(sync_client=True) as client:
    try:
        told(0)
        told(8, "kubernetes")
        told(8)
        told(2)
        told(8, cuda_devices=16)
        told(8)
    finally:
        client.delete_global_concurrency_limit_by_name("cuda-devices")
"""
    for count in (0, 2, 8):
        (tmp_path / str(count)).mkdir()
        for number in range(count):
            (tmp_path / str(count) / f"nvidia{number}").touch()
    plain = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    derived = "cuda-devices 8 (of this machine; --cuda-devices N changes it)"
    uncounted = "CUDA devices NOT counted (--cuda-devices N)"
    assert call([sys.executable, "-c", code, str(tmp_path)], plain).splitlines() == [
        *(uncounted, uncounted, derived),
        *("cuda-devices 8", "cuda-devices 16", "cuda-devices 16"),
    ]


def test_no_pod_holds_devices_while_it_waits_for_others(environment):
    """Of 16 devices, a run with a rank and three instances takes four. The queue lets four such runs start. A
    run that needs more than there are starts, and is refused by itself."""
    code = """
from engine.config import Config
from prefect.client.orchestration import get_client
from tasks.cluster import deploy
from tasks.cluster.deploy import Choices

pool, limit = "kubernetes-cuda", "cuda-devices"
template = deploy.read_template(pool)
deploy._make_pools({pool: template})
with get_client(sync_client=True) as client:
    for slots, instances in ((0, 3), (16, 3), (16, 40)):
        if slots:
            client.upsert_global_concurrency_limit_by_name(limit, slots)
        config = Config(rollout={"instances": 0})
        told = deploy._limit_runs(Choices(pool=pool, on_rollout_pool=instances), template[1], config)
        print(client.read_work_queue_by_name("default", pool).concurrency_limit, told)
    client.delete_global_concurrency_limit_by_name(limit)
"""
    assert call([sys.executable, "-c", code], environment).splitlines() == [
        "None ",
        "4 , 4 runs at once on kubernetes-cuda",
        "1 , 1 run at once on kubernetes-cuda",
    ]


def _registered(uri):
    """All policies that were registered; tests of other files that use the same servers may have made some."""
    from mlflow import MlflowClient

    return MlflowClient(uri).search_model_versions("name = 'metronome-quickstart-problems'")


def _check_mlflow(uri, folder, base):
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    [run] = client.search_runs(
        [one.experiment_id for one in client.search_experiments()], "attributes.run_name = 'day'"
    )
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "reward_mean")
    assert [(point.step) for point in history] == [0, 1]
    [version] = [one for one in _registered(uri) if one.run_id == run.info.run_id]
    tags = {name.removeprefix("metronome."): value for name, value in version.tags.items()}
    data = json.loads((folder / "day/data.json").read_text())
    final = list(read_lines(folder / "day/evaluations.jsonl"))[-1]
    assert tags["data_version"] == data["train"]["version"]
    assert (tags["steps"], tags["mode"], tags["start"]) == ("2", "periodic", "base")
    assert (Path(tags["base_model"]).resolve(), tags["base_model_hash"]) == (base.resolve(), content_hash(base))
    assert (tags["benchmark"], tags[f"avg_at_{final['samples']}"]) == (final["benchmark"], f"{final['avg_at_k']:.6f}")
    assert tags["config_hash"] == sha256((folder / "day/config.toml").read_bytes()).hexdigest()
    assert "continued_from" not in tags
    # the evaluation's, in the same run
    assert any("/avg_at_" in name for name in run.data.metrics), run.data.metrics
    return run


def _logs(api, flow_run):
    """The lines of a flow run's Logs tab."""
    query = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "sort": "TIMESTAMP_ASC"}
    return [one["message"] for one in post_json(f"{api}/logs/filter", query)]


def _check_artifacts(api, flow_run, run):
    """What the flow run's page shows in the Prefect UI."""
    query = {"artifacts": {"flow_run_id": {"any_": [flow_run]}}, "sort": "CREATED_DESC"}
    found = post_json(f"{api}/artifacts/filter", query)
    newest = {one["key"]: one for one in reversed(found)}
    assert {"mlflow", "training", "evaluation", "base-model", "registered-model"} <= set(newest)
    assert f"metronome watch {run.data.params['run.output']}" in newest["training"]["description"]
    assert f"/runs/{run.info.run_id}" in newest["mlflow"]["data"]
    assert newest["training"]["type"] == "progress"
    assert float(newest["training"]["data"]) == 100
    assert "2/2 steps  reward " in newest["training"]["description"]


def _check_s3(environment, folder):
    import s3fs

    store = s3fs.S3FileSystem(
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
    )
    [marker] = [
        name for name in store.find(f"{BUCKET}/checkpoints/day") if name.endswith("_SUCCESS.json") and "2" in name
    ]
    files = json.loads(store.cat(marker))["files"]
    assert all(store.exists(f"{os.path.dirname(marker)}/{name}") for name in files)
    [here] = (folder / "day/policy").glob("*.safetensors")
    assert store.cat(f"{os.path.dirname(marker)}/policy/{here.name}") == Path(here).read_bytes()
