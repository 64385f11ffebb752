import json
import shutil
import time
from dataclasses import asdict, fields
from pathlib import Path

import mlflow
import pytest

from engine.config import Checkpoint, Config, Run, Tracking, Train
from engine.errors import BadInput, RewardError
from engine.run.files import append_line, seal, write_json
from engine.run.folder import RunFolder
from engine.run.identity import claim_run
from engine.run.lock import hold_lock
from engine.run.run_file import read_run, update_run
from engine.types import StepReport
from flows.local import train_here
from support.run_folders import add_line, newer_attempt
from tasks.attempt import RegisteredPolicy
from tasks.tracking import evaluations, others, store, tracked_run
from tasks.tracking.mirror import metric_name


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return Config(run=Run(name="mine", output=str(tmp_path_factory.mktemp("runs"))), train=Train(steps=3))


def report(step):
    """A line of steps.jsonl with every key."""
    others = {"versions_seen": [step], "memory_peak_gib": [step], "reward_metrics": {"close": step}}
    return {field.name: step for field in fields(StepReport)} | others


def add_evaluation(config, row):
    """What an evaluation adds to the run folder: a table of its own, and a line."""
    number = len(list(config.folder.glob("evaluations/*.jsonl")))
    row = {"weight_version": row["step"], "samples": 1, "problems": 2, "ci_low": 0.1, "ci_high": 0.9} | row
    row["table"] = f"evaluations/{row['benchmark']}-{number}.jsonl"
    (config.folder / "evaluations").mkdir(parents=True, exist_ok=True)
    append_line(config.folder / row["table"], {"prompt_id": "x", "mean": 0.5})
    add_line(config.folder / "evaluations.jsonl", **row)


@pytest.fixture(scope="module")
def run(config):
    """A tracked run of two steps, resumed for a third, then registered."""
    with tracked_run.track_run(config) as first:
        for step in range(2):
            add_line(config.folder / "steps.jsonl", **report(step))
        add_evaluation(config, {"step": 0, "benchmark": "aime@24", "problems": 4, "skipped": {}, "avg_at_k": 0.5})
    policy = config.folder / "policy"
    policy.mkdir()
    config_json = {"architectures": ["Qwen3ForCausalLM"]}
    (policy / "config.json").write_text(json.dumps(config_json))
    with tracked_run.track_run(config) as second:
        add_line(config.folder / "steps.jsonl", **report(2))
        versions = [tracked_run.register_version("metronome-test", policy) for _ in range(2)]
        (policy / "config.json").write_text(json.dumps(config_json | {"trained": "on"}))
        versions.append(tracked_run.register_version("metronome-test", policy))
    assert first == second, "a resumed run goes on in the same MLflow run"
    assert versions == ["1", "1", "2"], "the same policy is registered once, however often it is tried"
    return mlflow.get_run(first)


def test_every_number_is_a_metric_every_setting_a_parameter_and_all_lies_under_the_output_folder(config, run):
    others = {"step", "versions_seen", "memory_peak_gib", "reward_metrics"}
    names = {field.name for field in fields(StepReport)} - others | {"memory_peak_gib_max", "versions_seen_count"}
    assert names <= set(run.data.metrics)
    assert not (others | {"ended_s"}) & set(run.data.metrics)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert run.data.metrics[f"{metric_name('aime@24')}/avg_at_1"] == 0.5
    assert run.data.params["train.steps"] == "3"
    assert run.data.params["rollout.group_size"] == "8"
    output = Path(config.run.output).resolve()
    assert (output / "mlflow.db").is_file()
    version = mlflow.MlflowClient().get_model_version("metronome-test", "2")
    assert version.run_id == run.info.run_id
    assert version.source.startswith(f"file://{output}")
    assert (Path(version.source.removeprefix("file://")) / "model/config.json").is_file()


@pytest.mark.parametrize(("error", "status"), [(BadInput, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_a_body_that_raises_marks_the_run(config, error, status):
    other = config.model_copy(update={"run": Run(name=status, output=config.run.output)})
    with pytest.raises(error), tracked_run.track_run(other) as number:
        raise error
    assert mlflow.get_run(number).info.status == status


def test_mlflow_knows_the_end_of_a_run_before_another_tracker_is_waited_for(config, monkeypatch):
    """A tracker that hangs would else take the seconds that a cancelled flow has."""
    found = []
    tracker = (lambda step, figures: None, lambda: found.append(mlflow.get_run(number).info.status))
    monkeypatch.setattr(others, "TRACKERS", {"wandb": lambda config: tracker})
    other = config.model_copy(
        update={"run": Run(name="other", output=config.run.output), "tracking": Tracking(also=("wandb",))}
    )

    def trains_a_step():
        nonlocal number
        with tracked_run.track_run(other) as number:
            add_line(other.folder / "steps.jsonl", **report(0))
            raise KeyboardInterrupt

    number = ""
    with pytest.raises(KeyboardInterrupt):
        trains_a_step()
    assert found == ["KILLED"]


def test_the_reason_of_a_failure_is_the_same_sentence_everywhere_until_the_run_goes_on(config):
    """Also of a stage that no process of the orchestrator runs, such as the first evaluation."""
    night = config.model_copy(update={"run": Run(name="night", output=config.run.output)})
    reason = "reward.function, prompt 7: ZeroDivisionError in bad_reward.py, line 3"
    with pytest.raises(RewardError), tracked_run.track_run(night) as number:
        raise RewardError(reason)
    assert RunFolder(night.folder).last_failure() == ("RewardError", reason)
    tags = mlflow.get_run(number).data.tags
    assert tags["metronome.failure"] == reason
    assert reason in tags["mlflow.note.content"]
    RunFolder(night.folder).failure.unlink()  # as a resume does
    with tracked_run.track_run(night):
        for _ in range(2):
            newer_attempt(night.folder)
        made = RegisteredPolicy("nights", "3", wins=False, reason="not better than version 2")
        update_run(night.folder, stages={"register": asdict(made)})
    tags = mlflow.get_run(number).data.tags
    assert tags["metronome.failure"] == ""
    assert reason not in tags["mlflow.note.content"]
    assert tags["metronome.resumed"] == "1"
    assert tags["metronome.start"] == "base"
    assert tags["metronome.champion"] == "not champion: not better than version 2"


def test_a_resumed_run_whose_input_is_refused_keeps_status_and_tags(config):
    """Unless a step was trained before."""
    other = config.model_copy(update={"run": Run(name="refused", output=config.run.output)})
    with tracked_run.track_run(other) as number:
        pass
    before = mlflow.get_run(number)
    longer = other.model_copy(update={"train": Train(steps=9)})
    with pytest.raises(BadInput), tracked_run.track_run(longer):
        raise BadInput("the device is gone")
    refused = mlflow.get_run(number)
    assert refused.info.status == "FINISHED"
    assert refused.data.tags == before.data.tags

    def trains_a_step():
        with tracked_run.track_run(longer):
            add_line(longer.folder / "steps.jsonl", **report(0))
            raise BadInput("the advantage function returned text")

    with pytest.raises(BadInput):
        trains_a_step()
    failed = mlflow.get_run(number)
    assert failed.info.status == "FAILED"
    assert failed.data.tags["changed.train.steps"] == "9"


def test_a_run_whose_folder_was_lost_goes_on_in_its_mlflow_run(config, tmp_path):
    """By the number in its published checkpoint; a new run of the same name, with a number of its own, does not."""
    place = Checkpoint(path=str(tmp_path))
    other = config.model_copy(update={"run": Run(name="lost", output=config.run.output), "checkpoint": place})
    claim_run(other, resume=False)
    with tracked_run.track_run(other) as first:
        for step in range(3):
            add_line(other.folder / "steps.jsonl", step=step, loss=float(step))
    published = tmp_path / "lost/step-000002"
    published.mkdir(parents=True)
    write_json(
        published / "_SUCCESS.json", seal({"step": 2, "files": {}, "run": read_run(other.folder).id, "began": 1.5})
    )
    shutil.rmtree(other.folder)
    claim_run(other, resume=True)
    with tracked_run.track_run(other) as second:
        for step in (2, 3):
            add_line(other.folder / "steps.jsonl", step=step, loss=10.0 + step)
    assert second == first == (other.folder / tracked_run.RUN_ID).read_text()
    history = mlflow.MlflowClient().get_metric_history(first, "loss")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 1.0), (2, 2.0), (2, 12.0), (3, 13.0)]

    shutil.rmtree(other.folder)
    anew = other.model_copy(update={"checkpoint": Checkpoint()})
    claim_run(anew, resume=False)
    with tracked_run.track_run(anew) as third:
        assert third != first


def test_an_evaluation_leaves_its_run_as_it_was(config):
    other = config.model_copy(update={"run": Run(name="evaluated", output=config.run.output)})
    with tracked_run.track_run(other) as number:
        pass
    for status in ("FINISHED", "KILLED", "RUNNING"):  # the last: a process that trains
        mlflow.MlflowClient().update_run(number, status)
        assert evaluations.log_finished(other) == number
        assert mlflow.get_run(number).info.status == status


def test_a_known_run_waits_for_a_store_that_is_away_and_a_new_one_does_not(config, monkeypatch):
    other = config.model_copy(update={"run": Run(name="waits", output=config.run.output)})
    monkeypatch.setattr(store, "RETRY_S", (0.01,))
    monkeypatch.setattr(store, "AWAY_S", 0.2)
    here = mlflow.get_experiment_by_name
    calls = []

    def away(name):
        calls.append(name)
        raise mlflow.MlflowException("connection refused")

    def back_soon(name):
        return away(name) if len(calls) < 3 else here(name)

    monkeypatch.setattr(mlflow, "get_experiment_by_name", away)
    with pytest.raises(BadInput, match="connection refused"), tracked_run.track_run(other):
        pass
    assert len(calls) == 1
    monkeypatch.setattr(mlflow, "get_experiment_by_name", here)
    with tracked_run.track_run(other) as first:
        pass
    calls.clear()
    monkeypatch.setattr(mlflow, "get_experiment_by_name", back_soon)
    with tracked_run.track_run(other) as second:
        assert first == second
    monkeypatch.setattr(mlflow, "get_experiment_by_name", away)
    with pytest.raises(
        store.TrackingAway, match=f"MLflow run {first}: MLflow did not answer for 0 s: connection refused"
    ):
        with tracked_run.track_run(other):
            pass


def test_a_training_that_is_refused_for_the_lock_does_not_touch_the_run_in_mlflow(config):
    other = config.model_copy(update={"run": Run(name="living", output=config.run.output)})
    folder = RunFolder(other.folder)
    with hold_lock(folder.lock, "the living one", 0.0):
        with pytest.raises(BadInput, match=r"run folder .*living is in use by process"):
            train_here(other, resume=True, replay=None, recipe="mine.toml")
    assert not (other.folder / tracked_run.RUN_ID).exists()


def test_an_artifact_store_that_is_away_is_waited_for_and_leaves_no_figure_to_be_logged_twice(config, monkeypatch):
    """Longer than a run waits at its end."""
    monkeypatch.setattr(store, "RETRY_S", (0.02,))
    monkeypatch.setattr(tracked_run, "CLOSE_S", 0.1)
    evaluated = config.model_copy(update={"run": Run(name="no-bucket", output=config.run.output)})
    add_evaluation(evaluated, {"step": 3, "benchmark": "b", "avg_at_k": 0.5})
    here = mlflow.MlflowClient.log_artifact
    asked = []

    def back_later(*arguments):
        asked.append(time.monotonic())
        if asked[-1] < asked[0] + 1.0:  # ten times CLOSE_S
            raise ConnectionError("no bucket")
        here(*arguments)

    def accuracies():
        run_id = (evaluated.folder / tracked_run.RUN_ID).read_text()
        return [point.value for point in mlflow.MlflowClient().get_metric_history(run_id, "b/avg_at_1")]

    monkeypatch.setattr(mlflow.MlflowClient, "log_artifact", back_later)
    for attempt in range(2):
        asked.clear()
        monkeypatch.setattr(store, "AWAY_S", 0.2)
        with pytest.raises(store.TrackingAway, match="all evaluations of run"):
            evaluations.log_finished(evaluated)
        assert accuracies() == [], attempt
    monkeypatch.setattr(store, "AWAY_S", 30.0)
    for _ in range(2):
        evaluations.log_finished(evaluated)
    assert accuracies() == [0.5]
