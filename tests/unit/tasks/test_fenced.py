"""Two flows of one run folder, and a flow whose orchestrator was taken over."""

import contextlib
import json
import sys
import time
from pathlib import Path

import mlflow
import pytest
from prefect.exceptions import TerminationSignal

from engine.config import Config, Run
from engine.errors import RewardError, TakenOver
from engine.run.folder import RunFolder
from engine.run.run_file import RunStart, read_run
from support.run_folders import EVALUATION, add_line, newer_attempt
from tasks.attempt import Stages, count_attempt, evaluation_failure, run_folder, write_fenced
from tasks.stages import orchestrator_process, train
from tasks.stages.evaluate import run_folder as evaluated_folder
from tasks.stages.flow_entry import enter_flow
from tasks.tracking import evaluations, run_page, tracked_run
from tasks.tracking.store import TrackingAway


@pytest.fixture
def config(tmp_path):
    return Config(run=Run(name="mine", output=str(tmp_path)))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def tracked(store, request):
    """The config of a run that shares its MLflow store, which takes seconds to make, and has an evaluation."""
    config = Config(run=Run(name=f"run-{abs(hash(request.node.name))}", output=str(store)))
    config.folder.mkdir()
    add_evaluation(config, 0, 0.421875)
    return config


def add_evaluation(config, version, accuracy):
    row = EVALUATION | {"avg_at_k": accuracy, "weight_version": version, "step": version, "table": "none"}
    add_line(config.folder / "evaluations.jsonl", **row)


def test_the_older_flow_does_no_further_stage_and_writes_none(config):
    with enter_flow(config, RunStart(), resume=False) as entry:
        entry.once("prepare data", lambda: 1)
        folder = run_folder(config)
        calls = []
        there = []

        def work():
            calls.append(1)
            newer_attempt(folder.path)  # the newer flow begins meanwhile
            there.append(read_run(folder.path))

        said = r"another attempt \(2\) writes it now; this one \(attempt 1\) stops"
        with pytest.raises(TakenOver, match=said):
            entry.once("convert", work)
        with pytest.raises(TakenOver, match=said):
            entry.once("evaluate", work)
        with pytest.raises(TakenOver, match=said):
            count_attempt(folder, "training", 3, "it was ended")
        with pytest.raises(TakenOver, match=said):
            evaluated_folder(config).add_evaluation({})
        assert calls == [1]
        assert there == [read_run(folder.path)]
    assert not folder.evaluations.exists()
    Stages(RunFolder(config.folder)).once("convert", lambda: 2)  # whoever has not entered it is not fenced off


def test_the_older_flow_leaves_no_reason_in_the_newer_ones_folder(config):
    def ends():
        newer_attempt(config.folder)
        raise TrackingAway("MLflow does not answer")

    with pytest.raises(TrackingAway), enter_flow(config, RunStart(), resume=False):
        ends()
    assert not RunFolder(config.folder).failure.exists()


TAKEN = """
import pathlib, sys
from engine.run.event_stream import EventWriter
pathlib.Path(sys.argv[1]).write_text('{"error": "DiskError", "message": "of the newer orchestrator"}')
EventWriter(int(sys.argv[2])).send("failed", ["TakenOver", "another orchestrator writes it now"])
sys.exit(1)
"""


def test_a_orchestrator_that_was_taken_over_ends_its_flow_which_writes_nothing(config, monkeypatch):
    folder = RunFolder(config.folder)
    folder.create(config, resume=False)
    command = [sys.executable, "-c", TAKEN, str(folder.failure)]
    monkeypatch.setattr(orchestrator_process, "orchestrator_command", lambda *_, events, **__: [*command, str(events)])
    monkeypatch.setattr(train, "TrainingProgress", lambda config: contextlib.nullcontext())
    with pytest.raises(TakenOver, match="another orchestrator writes it now"):
        train.train.fn(config)
    assert folder.last_failure() == ("DiskError", "of the newer orchestrator")
    assert not (folder.path / "timeline.html").exists()


def test_the_training_of_the_older_flow_ends_before_a_step_is_logged(config, monkeypatch):
    logged = []
    monkeypatch.setattr(train, "TrainingProgress", lambda config: contextlib.nullcontext(logged.append))
    monkeypatch.setattr(train, "run_training", lambda *_, on_step: on_step({"step": 0}))
    folder = RunFolder(config.folder)
    folder.create(config, resume=False)
    with write_fenced(folder, 0):
        folder.fence.begin_attempt("flow", "")
        newer_attempt(folder.path)
        with pytest.raises(TakenOver):
            train.train.fn(config)
    assert logged == []
    assert not folder.failure.exists()


def test_the_mlflow_run_goes_on_in_the_process_that_writes_the_run_now(tracked):
    with pytest.raises(TakenOver), tracked_run.track_run(tracked) as run:
        raise TakenOver("another orchestrator writes it now")
    client = mlflow.MlflowClient()
    assert client.get_run(run).info.status == "RUNNING"
    assert client.list_artifacts(run) == []
    assert not (tracked.folder / "timeline.html").exists()


def page_of(config):
    """What the page in the run folder shows; MLflow has the same page."""
    page = (config.folder / "timeline.html").read_text()
    run = tracked_run.find_run(config)
    logged = mlflow.artifacts.download_artifacts(run_id=run, artifact_path="timeline.html")
    assert Path(logged).read_text() == page
    return json.loads(page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])


def test_the_page_is_drawn_after_the_last_stage_and_again_after_an_evaluation(tracked):
    with enter_flow(tracked, RunStart(), resume=False) as finished, tracked_run.track_run(tracked):
        finished.once("train", lambda: 50)
        add_evaluation(tracked, 50, 0.9765625)
        finished.once("announce", lambda: None)
    shown = page_of(tracked)
    assert shown["state"]["state"] == "finished"
    assert [row["avg_at_k"] for row in shown["rest"]["evaluations"]] == [0.421875, 0.9765625]
    add_evaluation(tracked, 50, 0.875)
    evaluations.log_or_say(tracked)
    assert page_of(tracked)["rest"]["evaluations"][-1]["avg_at_k"] == 0.875


@pytest.mark.parametrize(
    ("ended", "state", "reason"),
    [
        (RewardError("it raised"), "failed", "RewardError: it raised"),
        (KeyboardInterrupt(), "stopped", "Stopped: ended by SIGINT"),
    ],
)
def test_the_page_of_a_run_that_was_ended_says_why_and_how_it_goes_on(tracked, ended, state, reason):
    with pytest.raises(type(ended)), enter_flow(tracked, RunStart(), False), tracked_run.track_run(tracked):
        raise ended
    shown = page_of(tracked)["state"]
    assert (shown["state"], shown["failure"]) == (state, reason)
    assert f" run --resume --set run.name={tracked.run.name} --set run.output=" in shown["resume"]


def test_a_page_that_takes_long_holds_an_interruption_up_for_seconds(tracked, monkeypatch, capsys):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(run_page, "timeline_command", lambda folder: command)
    monkeypatch.setattr(run_page, "HURRY_S", 1.0)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), enter_flow(tracked, RunStart(), False), tracked_run.track_run(tracked):
        raise KeyboardInterrupt
    assert time.monotonic() - began < 15
    assert "it took more than 1 s; draw it: " in capsys.readouterr().err
    assert not (tracked.folder / "logs/timeline.log").exists()


@pytest.mark.parametrize(("ended", "name"), [(KeyboardInterrupt(), "SIGINT"), (TerminationSignal(15), "SIGTERM")])
def test_a_flow_that_a_signal_ends_says_which(config, ended, name):
    """Prefect raises an exception of its own for SIGTERM. An error that the orchestrator told stays."""

    def flow(told):
        with enter_flow(config, RunStart(), resume=bool(told)):
            if told:
                run_folder(config).write_failure(RewardError(told))
            raise ended

    for told in ("", "the reward raised"):
        with pytest.raises(type(ended)):
            flow(told)
        assert RunFolder(config.folder).last_failure() == (
            ("RewardError", told) if told else ("Stopped", f"ended by {name}")
        )


def test_an_evaluation_that_fails_leaves_its_reason_but_not_in_a_trainings_folder(config):
    folder = RunFolder(config.folder)
    folder.create(config, resume=False)
    with pytest.raises(RewardError), evaluation_failure(folder):
        raise RewardError("it raised ZeroDivisionError")
    assert folder.last_failure() == ("RewardError", "it raised ZeroDivisionError")
    with evaluation_failure(folder):
        pass
    assert folder.last_failure() is None
    folder.steps.touch()
    folder.write_failure(TakenOver("how the training ended"))
    with pytest.raises(RewardError), evaluation_failure(folder):
        raise RewardError("it raised ZeroDivisionError")
    assert folder.last_failure() == ("TakenOver", "how the training ended")
