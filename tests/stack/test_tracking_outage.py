"""A real MLflow server that is stopped in the middle of a run and brought back, or not."""

import re
import shutil
import time
from pathlib import Path

import mlflow
import pytest

from engine.config import Config, Run, Tracking, Train
from engine.errors import BadInput
from engine.run.files import read_lines
from flows.local import evaluate_here
from support.ports import free_port
from support.run_folders import add_line
from support.runs import config_of, save_model, wait_for
from support.stack import Services
from tasks.tracking import evaluations, mirror, store, tracked_run
from tasks.tracking.registered_policies import model_folder, registered_name

pytestmark = pytest.mark.stack

RECIPE = "infra/recipes/quickstart.toml"


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    with Services(tmp_path_factory.mktemp("services"), prefect=False, s3=False) as found:
        yield found


@pytest.fixture
def config(services, tmp_path, monkeypatch):
    before = mlflow.get_tracking_uri()
    monkeypatch.setattr(mirror, "EVERY_S", 0.2)
    yield Config(
        run=Run(name="run", output=str(tmp_path)), train=Train(steps=10), tracking=Tracking(uri=services["mlflow"].url)
    )
    mlflow.set_tracking_uri(before)


def do_step(config, step):
    """What the orchestrator does."""
    add_line(config.folder / "steps.jsonl", step=step, loss=step / 10, step_s=1.0)


def history(run_id):
    return [(point.step, point.value) for point in mlflow.MlflowClient().get_metric_history(run_id, "loss")]


def test_a_server_that_comes_back_gets_every_step_once(services, config, capsys):
    server = services["mlflow"]
    with tracked_run.track_run(config) as run_id:
        do_step(config, 0)
        wait_for(lambda: history(run_id) == [(0, 0.0)], "step 0")
        server.stop()
        started = time.monotonic()
        for step in (1, 2, 3):
            do_step(config, step)
        # each, if they did, until its request gives up
        assert time.monotonic() - started < 4.0, "steps wait for the server"
        wait_for(
            lambda: "does not take" in (told := capsys.readouterr().err) and server.url in told, "the warning", 30.0
        )
        server.start()
        server.wait()
        do_step(config, 4)
        wait_for(lambda: len(history(run_id)) == 5, "all steps")
    assert history(run_id) == [(step, step / 10) for step in range(5)]
    assert "is answering again" in capsys.readouterr().err
    assert mlflow.get_run(run_id).info.status == "FINISHED"
    assert "steps.jsonl" in [item.path for item in mlflow.MlflowClient().list_artifacts(run_id)]


def test_a_server_that_stays_away_does_not_end_the_run_and_what_is_missing_is_named(
    services, config, capsys, monkeypatch
):
    monkeypatch.setattr(tracked_run, "CLOSE_S", 2.0)
    server = services["mlflow"]
    with tracked_run.track_run(config) as run_id:
        do_step(config, 0)
        wait_for(lambda: history(run_id) == [(0, 0.0)], "step 0")
        server.stop()
        for step in (1, 2):
            do_step(config, step)
    told = capsys.readouterr().err
    assert "did not receive: metrics of step 1 to 2" in told
    assert "steps.jsonl" in told
    assert "still shows this run as RUNNING, but it is FINISHED" in told
    server.start()
    server.wait()
    assert history(run_id) == [(0, 0.0)]
    with tracked_run.track_run(config) as again:  # the next attempt sends it
        pass
    assert again == run_id
    assert history(run_id) == [(step, step / 10) for step in range(3)]


def test_an_evaluation_needs_no_server_and_is_logged_when_there_is_one(services, settings, capsys, monkeypatch):
    """The command itself, with a real model and instance."""
    monkeypatch.setattr(store, "AWAY_S", 2.0)
    server = services["mlflow"]
    before = mlflow.get_tracking_uri()
    config = config_of(settings | {"tracking.uri": server.url, "evaluate.problems": 2, "evaluate.max_new_tokens": 4})
    server.stop()
    evaluate_here(config)
    told = capsys.readouterr()
    assert "accuracy" in told.out or "avg@1" in told.out
    assert "MLflow did not answer for 2 s" in told.err
    assert str(config.folder / "evaluations.jsonl") in told.err
    [row] = read_lines(config.folder / "evaluations.jsonl")
    server.start()
    server.wait()
    evaluations.log_finished(config)
    run = mlflow.get_run((config.folder / "mlflow_run_id").read_text())
    [logged] = [value for name, value in run.data.metrics.items() if re.search(r"/avg_at_\d+$", name)]
    assert logged == row["avg_at_k"]
    assert run.info.status == "FINISHED"
    mlflow.set_tracking_uri(before)


def test_a_server_that_does_not_answer_at_the_start_is_bad_input(config):
    other = config.model_copy(update={"tracking": Tracking(uri=f"http://127.0.0.1:{free_port()}")})
    started = time.monotonic()
    with pytest.raises(BadInput, match=r"tracking\.uri = 'http://127\.0\.0\.1"), tracked_run.track_run(other):
        pass
    assert time.monotonic() - started < 30


@pytest.mark.nightly
def test_policies_outlast_a_restart_of_the_services_and_are_named_when_their_files_are_gone(tmp_path):
    place = tmp_path / "services"
    with Services(place, prefect=False) as running:
        client = mlflow.MlflowClient(running["mlflow"].url)
        run = client.create_run(client.create_experiment("mine"))
        client.log_artifacts(run.info.run_id, save_model(tmp_path / "model"), "policy")
        source = f"{run.info.artifact_uri}/policy"
        name = registered_name(RECIPE, Config())
        client.create_registered_model(name)
        client.create_model_version(name, source, run.info.run_id)
    with Services(place, prefect=False) as running:  # with the S3 endpoint, which has forgotten everything
        tracking = Tracking(uri=running["mlflow"].url)
        here = Config(run=Run(name="run", output=str(tmp_path)), tracking=tracking)
        found = Path(model_folder(here, RECIPE, "latest").model.path)
        assert (found / "config.json").read_bytes() == (tmp_path / "model/config.json").read_bytes()
        shutil.rmtree(found)
        shutil.rmtree(place / "mlartifacts")
        with pytest.raises(BadInput, match=f"the policy of {name} version 1 is registered at .* files are gone"):
            model_folder(here, RECIPE, "latest")
