import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest
import requests
from hypothesis import example, given
from hypothesis import strategies as st

from engine.config import Config, Data, Run, Tracking, Train
from tasks.tracking import mlflow_run, tracked_run, write_queue
from tasks.tracking.metric_names import metric_name, numbers


class Store:
    """Takes the place of MLflow's client: refuses, is away, or keeps what it gets."""

    def __init__(self):
        self.away = False
        self.refuses = False
        self.got = []
        self.requests = 0

    def log_batch(self, run_id, metrics):
        self.requests += 1
        if self.away:
            raise ConnectionError("nobody there")
        if self.refuses:
            raise mlflow.MlflowException(
                "no such metric", error_code=mlflow.protos.databricks_pb2.INVALID_PARAMETER_VALUE
            )
        self.got += [(metric.step, metric.key, metric.value) for metric in metrics]


@pytest.fixture
def store(monkeypatch):
    found = Store()
    monkeypatch.setattr(mlflow, "MlflowClient", lambda: found)
    monkeypatch.setattr(write_queue, "RETRY_S", (0.02,))
    return found


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_an_absent_server_misses_is_written_in_order_when_it_is_back(store):
    said = []
    own = write_queue.WriteQueue("run", said.append)
    store.away = True
    for step in range(1500):
        own.metrics({"loss": float(step)}, step)
    until(lambda: store.requests > 2)
    store.away = False
    assert own.close(10.0) == []
    assert store.got == [(step, "loss", float(step)) for step in range(1500)]
    assert store.requests < 50, "steps go in few requests"
    assert len(said) == 2
    assert "does not take metrics of step 0: nobody there" in said[0]
    assert "answers again" in said[1]


def test_what_is_missing_at_the_end_is_named(store):
    said = []
    own = write_queue.WriteQueue("run", said.append)
    store.away = True
    for step in (3, 4, 5, 9):
        own.metrics({"loss": 1.0}, step)
    own.do("the tag x", lambda: None)
    started = time.monotonic()
    missing = own.close(0.2)
    assert time.monotonic() - started < 10
    assert missing == ["metrics of step 3", "metrics of step 4", "metrics of step 5", "metrics of step 9", "the tag x"]
    assert "has not got: metrics of step 3 to 5, metrics of step 9, the tag x." in said[-1]


def test_what_is_refused_is_left_out_and_named_and_the_rest_goes_on(store):
    said = []
    own = write_queue.WriteQueue("run", said.append)
    store.refuses = True
    own.metrics({"loss": 1.0}, 0)
    until(lambda: said)
    store.refuses = False
    own.metrics({"loss": 2.0}, 1)
    assert own.close(5.0) == ["metrics of step 0"]
    assert store.got == [(1, "loss", 2.0)]
    assert "refuses metrics of step 0: no such metric" in said[0]


@pytest.mark.parametrize(
    ("status", "pointless"), [(400, True), (401, True), (404, True), (408, False), (429, False), (500, False)]
)
def test_a_wrong_request_is_refused_and_an_overloaded_server_is_asked_again(status, pointless):
    away = requests.HTTPError("no", response=SimpleNamespace(status_code=status))
    assert write_queue.refused(away) == pointless
    codes = mlflow.exceptions.ERROR_CODE_TO_HTTP_STATUS
    for code in (code for code, number in codes.items() if number == status):
        refusal = mlflow.MlflowException("no", error_code=mlflow.protos.databricks_pb2.ErrorCode.Value(code))
        assert write_queue.refused(refusal) == pointless


def test_a_server_that_hangs_holds_neither_the_steps_nor_the_end_up(store):
    hang = threading.Event()
    own = write_queue.WriteQueue("run", lambda text: None)
    own.do("the tag x", lambda: hang.wait(30))
    started = time.monotonic()
    own.metrics({"loss": 1.0}, 0)
    assert own.close(0.2) == ["the tag x", "metrics of step 0"]
    assert time.monotonic() - started < 10
    hang.set()


def test_figures_of_a_row():
    row = {
        "step": 3,
        "loss": 0.5,
        "versions_seen": [2, 3],
        "none": [],
        "text": "x",
        "flag": True,
        "skipped": {"too long": 4},
    }
    assert numbers(row) == {
        "loss": 0.5,
        "versions_seen_count": 2.0,
        "versions_seen_min": 2.0,
        "versions_seen_max": 3.0,
        "none_count": 0.0,
        "flag": 1.0,
        "skipped/too long": 4.0,
    }


@given(st.sets(st.text("ab@:/_ -.", min_size=1, max_size=6), min_size=2))
@example({"aime@24", "aime_24", "aime:24"})
def test_names_of_different_texts_are_different_and_mlflow_takes_them(texts):
    names = list(map(metric_name, texts))
    assert len(set(names)) == len(texts)
    assert not any(re.search(r"[^\w.\- ]", name) for name in names)
    assert metric_name("my set-1.0_b") == "my set-1.0_b"


def test_a_long_parameter_is_cut_and_says_so():
    assert mlflow_run.cut("x" * 6000) == "x" * 6000
    short = mlflow_run.cut("x" * 6001)
    assert len(short) == 6000
    assert short.endswith("xxx ... (6001 characters; whole in config.toml)")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tracked run with files in its folder, then resumed with other settings."""
    output = str(tmp_path_factory.mktemp("runs"))
    config = Config(run=Run(name="files", output=output), data=Data(train="d" * 7000), train=Train(steps=40))
    model = config.folder.parent / "base.model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    with tracked_run.tracked(config):
        responses = config.folder / "responses"
        responses.mkdir()
        for step in range(4):
            (responses / f"step-{step:06d}.jsonl").write_text("{}\n")
            tracked_run.log_step({"step": step, "loss": 1.0})
        (config.folder / "timeline.html").write_text("<html>")
        mlflow_run.log_model_input(model)
    longer = config.model_copy(update={"train": Train(steps=50)})
    with tracked_run.tracked(longer) as run_id:
        mlflow_run.log_model_input(model)
    return mlflow.get_run(run_id)


def test_the_run_folders_files_and_every_other_steps_responses_become_artifacts(run):
    client = mlflow.MlflowClient()
    assert {item.path for item in client.list_artifacts(run.info.run_id)} >= {"timeline.html", "responses"}
    samples = {item.path for item in client.list_artifacts(run.info.run_id, "responses")}
    assert samples == {"responses/step-000000.jsonl", "responses/step-000002.jsonl"}, "40 steps: every second"


def test_parameters_keep_what_the_run_began_with_and_tags_say_what_changed(run):
    assert run.data.params["train.steps"] == "40"
    assert run.data.tags["changed.train.steps"] == "50"
    assert len(run.data.params["data.train"]) == 6000
    assert "changed.data.train" not in run.data.tags


def test_the_machines_load_is_sampled(run):
    assert run.data.metrics["system/cpu_utilization_percentage"] >= 0
    assert run.data.metrics["system/system_memory_usage_megabytes"] > 100


def test_the_base_model_is_an_input_once(run):
    assert len(run.inputs.model_inputs) == 1
    model = mlflow.MlflowClient().get_logged_model(run.inputs.model_inputs[0].model_id)
    assert model.params["path"].endswith("base.model")
    assert len(model.params["content_hash"]) == 64


def test_going_on_with_a_run_writes_the_steps_that_mlflow_missed(run):
    folder = Path(run.data.tags["metronome.run_folder"])
    config = Config(run=Run(name="gap", output=str(folder.parent)), train=Train(steps=5))
    rows = [{"step": step, "loss": step / 10} for step in range(5)]
    with tracked_run.tracked(config):
        for row in rows[:2]:
            tracked_run.log_step(row)  # the server was away for the other three
    (config.folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint = config.folder / "checkpoints" / "step-000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "_SUCCESS.json").write_text(json.dumps({"step": 4, "files": {}}))
    with tracked_run.tracked(config) as run_id:
        pass
    history = mlflow.MlflowClient().get_metric_history(run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)], (
        "4 is done again"
    )


def test_where_to_look(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert " ui --backend-store-uri sqlite:///" in tracked_run.ui_command(Config())
    assert tracked_run.ui_command(Config(tracking=Tracking(uri="http://tracker:5000"))) == "http://tracker:5000"
