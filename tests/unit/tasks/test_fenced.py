"""Two flows of one run folder, and a flow whose orchestrator was taken over."""

import contextlib
import sys

import mlflow
import pytest
from prefect.exceptions import TerminationSignal

from engine.config import Config, Run
from engine.errors import RewardError, TakenOver
from engine.run.folder import RunFolder
from engine.run.run_file import RunStart, read_run
from support.run_folders import newer_attempt
from tasks.attempt import Stages, count_attempt, evaluation_failure, run_folder, write_fenced
from tasks.stages import orchestrator_process, train
from tasks.stages.evaluate import run_folder as evaluated_folder
from tasks.stages.flow_entry import enter_flow
from tasks.tracking import tracked_run
from tasks.tracking.store import TrackingAway


@pytest.fixture
def config(tmp_path):
    return Config(run=Run(name="mine", output=str(tmp_path)))


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
    monkeypatch.setattr(train, "TrainingArtifacts", lambda config: contextlib.nullcontext())
    with pytest.raises(TakenOver, match="another orchestrator writes it now"):
        train.train.fn(config)
    assert folder.last_failure() == ("DiskError", "of the newer orchestrator")
    assert not (folder.path / "timeline.html").exists()


def test_the_training_of_the_older_flow_ends_before_a_step_is_logged(config, monkeypatch):
    logged = []
    monkeypatch.setattr(train, "TrainingArtifacts", lambda config: contextlib.nullcontext(logged.append))
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


def test_the_mlflow_run_goes_on_in_the_process_that_writes_the_run_now(config):
    RunFolder(config.folder).create(config, resume=False)
    with pytest.raises(TakenOver), tracked_run.track_run(config) as run:
        raise TakenOver("another orchestrator writes it now")
    client = mlflow.MlflowClient()
    assert client.get_run(run).info.status == "RUNNING"
    assert client.list_artifacts(run) == []


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
