"""What MLflow's UI shows of a run, in a real store: its page, descriptions, figures that do not repeat each other."""

import mlflow
import pytest

from engine.config import Config, Run, Tracking
from engine.run.files import append_line
from engine.run.folder import RunFolder
from engine.run.run_file import RunStart, update_run
from support.run_folders import add_line
from tasks.tracking import descriptions, evaluation_texts, evaluations, tracked_run

ROW = {
    "weight_version": 0,
    "benchmark": "sums@9",
    "problems": 4,
    "samples": 1,
    "avg_at_k": 0.5,
    "ci_low": 0.4,
    "ci_high": 0.6,
    "pass_at_k": 0.5,
    "maj_at_k": 0.5,
    "pass_curve": {"1": 0.5},
    "best_at_k_bootstrap": 0.5,
    "truncated": 0,
}


@pytest.fixture
def config(tmp_path):
    config = Config(run=Run(name="night", output=str(tmp_path)), tracking=Tracking(experiment="mine"))
    folder = RunFolder(config.folder)
    folder.path.mkdir()
    update_run(folder.path, start=RunStart(recipe="mine.toml"))
    folder.create(config, resume=False)
    return config


def finished(config):
    """A tracked run with a step and two evaluations; its id."""
    folder = RunFolder(config.folder)
    with tracked_run.track_run(config) as run_id:
        add_line(folder.steps, step=0, reward_mean=0.5, step_s=8.0)
        for step in (0, 5):
            add_evaluation(folder, ROW | {"step": step, "weight_version": step, "avg_at_k": 0.5 + step / 10})
    return run_id


def add_evaluation(folder, row):
    table = f"evaluations/{row['benchmark']}-{row['step']}.jsonl"
    (folder.path / "evaluations").mkdir(exist_ok=True)
    append_line(folder.path / table, {"prompt_id": "x", "mean": 0.5})
    add_line(folder.evaluations, **row | {"table": table})


@pytest.mark.parametrize("uri", ["", "http://127.0.0.1:9"])
def test_where_to_look(config, monkeypatch, uri):
    """A store without a server has a command that starts one; nothing is asked for an experiment's page for long."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if uri:
        away = config.model_copy(update={"tracking": Tracking(uri=uri)})
        assert tracked_run.page_rows(away) == {"MLflow": uri}
        return
    experiment = mlflow.get_run(finished(config)).info.experiment_id
    rows = tracked_run.page_rows(config)
    assert rows["its page"] == f"http://127.0.0.1:5000/#/experiments/{experiment}/runs"
    assert f" ui --backend-store-uri sqlite:///{config.folder.parent}/mlflow.db" in rows["MLflow UI"]


def test_a_run_says_what_it_is_and_how_it_ended(config):
    run_id = finished(config)
    client = mlflow.MlflowClient()
    note = mlflow.get_run(run_id).data.tags[descriptions.NOTE]
    assert "Trains `quickstart_model` on" in note
    assert "recipe `mine.toml`" in note
    assert "| accuracy after | avg@1 1.000 [0.400, 0.600] on 4 problems of sums@9 (version 5) |" in note
    assert f"    metronome train {config.folder}/config.toml --set run.name=night-again" in note
    update_run(config.folder, flow_run="of a flow run")
    again = f"    metronome run {config.folder}/config.toml --set run.name=night-again"
    assert again in descriptions.of_run(config)
    assert f"    metronome compare {config.folder} OTHER_RUN" in note

    client.set_tag(run_id, descriptions.NOTE, "best of the week")  # by a person
    with tracked_run.track_run(config):
        pass
    assert mlflow.get_run(run_id).data.tags[descriptions.NOTE] == "best of the week"


def test_an_evaluation_of_a_run_changes_none_of_its_settings(config):
    run_id = finished(config)
    RunFolder(config.folder).steps.unlink()
    policy = config.model_copy(update={"model": config.model.model_copy(update={"path": "policy"})})
    assert evaluations.log_finished(policy) == run_id
    run = mlflow.get_run(run_id)
    assert "Evaluates `policy`; nothing is trained here." in run.data.tags[descriptions.NOTE]
    add_line(RunFolder(config.folder).steps, step=0)
    evaluations.log_finished(policy)  # of a run that was trained: it is described with its own model
    assert mlflow.get_run(run_id).data.tags[descriptions.NOTE].startswith("Trains `quickstart_model` on")
    assert [name for name in run.data.tags if name.startswith("changed.")] == []
    assert run.data.params["model.path"] == config.model.path
    with tracked_run.track_run(policy):  # a resume with another model is told
        pass
    assert mlflow.get_run(run_id).data.tags["changed.model.path"] == "policy"


def test_figures_that_repeat_each_other_are_logged_once(config):
    run_id = finished(config)
    names = {name for name in mlflow.get_run(run_id).data.metrics if name.startswith("sums_9-9e0a37/")}
    assert names == {
        f"sums_9-9e0a37/{name}"
        for name in ("problems", "samples", "avg_at_1", "avg_at_1_ci_low", "avg_at_1_ci_high", "truncated")
    }
    with tracked_run.track_run(config):
        add_evaluation(RunFolder(config.folder), ROW | {"step": 6, "samples": 4, "benchmark": "four"})
    assert {"four/pass_at_4", "four/maj_at_4", "four/pass_curve/1"} <= set(mlflow.get_run(run_id).data.metrics)


def test_a_registered_policy_says_what_it_is(config):
    finished(config)
    folder = RunFolder(config.folder)
    text = descriptions.of_policy(folder, config, "It became `champion`: better.")
    assert text.startswith(f"The policy of run night after {config.train.steps} steps. Trains `quickstart_model` on")
    assert "It became `champion`: better." in text
    assert evaluation_texts.closing_rows(folder)["accuracy after"] in text
    assert f"    metronome serve --model {config.folder} --port 8000" in text
