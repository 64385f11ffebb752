"""What an operator reads about runs without a UI."""

import os
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from engine.config import Config
from engine.errors import RewardError, Stopped
from engine.run.files import append_line
from engine.run.folder import RunFolder
from engine.run.lock import hold_lock
from engine.run.run_file import START, update_run
from flows.cli import app
from support.run_folders import EVALUATION
from tasks.attempt import RegisteredPolicy

REASON = "reward.function, prompt 7: it raised ZeroDivisionError"


@pytest.fixture
def said(tmp_path, monkeypatch):
    """What a command prints about two runs: `bad` has failed, `night` goes on."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    for age, name in enumerate(("night", "bad")):
        config = Config(run={"name": name, "output": str(tmp_path)}, train={"steps": 4})
        folder = RunFolder(config.folder)
        folder.create(config, resume=False)
        os.utime(folder.config, (1000 - age, 1000 - age))
        (folder.logs / "trainer.log").write_text(f"2026-11-27 22:00:01.000 {name} step 1\n  more\n{name} step 2\n")
        (folder.logs / "orchestrator.log").write_text("2026-11-27 22:00:00.500 listens\n2026-11-27 22:00:02.000 ends\n")
        (folder.logs / "instance-0.log").write_text("INFO 11-27 22:00:01 [core.py:58] loads\n")
        os.utime(folder.logs / "instance-0.log", (1795730401, 1795730401))
    folder.write_failure(RewardError(REASON))
    folder.fence.begin_attempt("training", START)
    night = RunFolder(tmp_path / "night")
    figures = {"step_s": 1800.0, "trained_tokens": 7200, "tokens_per_s_per_device": 2.0, "reward_mean": 0.5}
    for step in range(2):
        append_line(night.steps, {"step": step} | figures)
    made = RegisteredPolicy("nights", "3", wins=False, reason="not better than version 2")
    update_run(night.path, stages={"prepare data": {}, "register": asdict(made)})

    def run(*command, code=0):
        with hold_lock(night.lock, "night", 0.0):
            done = CliRunner().invoke(app, [*command, "--output", str(tmp_path)])
        assert done.exit_code == code, done.output
        return done.output

    return run


def test_a_night_is_one_line(said):
    head, night, bad = said("runs").splitlines()[:3]
    for part in ("night", "Running", "2/4", "not champion: not better than version 2", "2.00"):
        assert part in night
    assert "Failed" in bad
    assert bad.endswith(REASON)


def test_without_a_right_answer_of_the_server_the_states_are_those_of_the_folders(said, monkeypatch):
    for wrong in ("http://127.0.0.1:port/api", "http://[::1/api"):
        monkeypatch.setenv("PREFECT_API_URL", wrong)
        assert "Running" in said("runs")


@pytest.mark.parametrize("name", ["run.json", "config.toml"])
def test_a_damaged_run_is_told_and_hides_no_other(said, tmp_path, name):
    (tmp_path / "bad" / name).write_text("{")
    listed = said("runs")
    assert "2/4" in listed
    head = listed.splitlines()[0]
    [bad] = [line for line in listed.splitlines() if line.startswith("bad ")]
    assert "Damaged" in bad
    assert bad[head.index("where") : head.index("reason")].strip() == str(tmp_path / "bad")
    assert name in bad[head.index("reason") :]


def test_the_status_says_how_far_a_run_is_and_why_it_failed(said):
    assert "2 of 4" in said("status")
    assert "time left        1:00:00" in said("status", "night")
    assert REASON in said("status", "bad (try 2)").replace("\n", " ")
    assert "no such run" in said("status", "other", code=2)


def test_what_status_says_to_type_works_from_any_folder(said, tmp_path):
    told = said("status", "bad")
    assert f" logs {tmp_path / 'bad'}\n" in told
    [resume] = [line.split() for line in told.splitlines() if line.startswith("  resume ")]
    assert resume[2:] == ["train", "--resume", "--set", "run.name=bad", "--set", f"run.output={tmp_path}"]
    assert "resume" not in said("status", "night")


def test_a_pipeline_that_died_before_its_first_step_is_not_finished(said, tmp_path):
    folder = RunFolder(tmp_path / "bad")
    folder.failure.unlink()
    append_line(folder.evaluations, EVALUATION)
    update_run(folder.path, stages={"prepare data": {}, "evaluate version 0": {}}, flow_run="gone")
    for listed in (said("runs").splitlines()[2], said("status", "bad")):
        assert "Died" in listed
        assert "its process died without a message" in listed
    update_run(folder.path, attempts=())  # `metronome evaluate` alone
    assert "Evaluated" in said("status", "bad")
    assert "0/4" not in said("runs").splitlines()[2]


def test_a_flow_that_waits_or_goes_on_has_the_servers_state_and_one_that_ended_its_folders(said, monkeypatch, tmp_path):
    def server(url, wanted):
        return [
            {"id": name, "name": name, "state_type": kind, "state_name": state}
            for name, kind, state in (("night", "RUNNING", "Cancelling"), ("bad", "COMPLETED", "Completed"))
        ]

    for name in ("night", "bad"):
        update_run(tmp_path / name, flow_run=name)
    monkeypatch.setenv("PREFECT_API_URL", "any")
    monkeypatch.setattr("tasks.commands.run_reports.post_json", server)
    assert [line.split()[:2] for line in said("runs").splitlines()[1:3]] == [["night", "Cancelling"], ["bad", "Failed"]]


def test_a_resumed_run_that_goes_on_has_no_failure_but_says_why_it_was_resumed(said, tmp_path):
    night = RunFolder(tmp_path / "night")
    night.fence.begin_attempt("training", "ended by SIGKILL")
    assert "resumed          1 time, last after: ended by SIGKILL" in said("status", "night")
    night.fence.begin_attempt("flow", "")
    night.fence.begin_attempt("training", START)
    assert "last after: ended by SIGKILL" in said("status", "night")
    assert "fail" not in said("status", "night")


def test_a_folder_of_runs_that_is_not_there_is_an_error():
    done = CliRunner().invoke(app, ["runs", "--output", "nowhere"])
    assert (done.exit_code, done.stderr) == (2, "error: --output nowhere: no such folder\n")


def test_a_run_that_does_not_go_on_has_no_time_left(said, tmp_path):
    append_line(RunFolder(tmp_path / "bad").steps, {"step": 0, "step_s": 1800.0})
    told = said("status", "bad")
    assert "1 of 4" in told
    assert "time left" not in told
    assert "refused before it had a folder" in said("logs", "other (refused)", code=2)


def test_the_logs_of_all_processes_are_merged_by_time(said):
    told = said("logs", "night").splitlines()
    assert [line.split()[0] for line in told] == [
        "orchestrator",
        "instance-0",
        *["trainer"] * 3,
        "orchestrator",
    ]
    assert told[-2] == "trainer        night step 2"
    told = said("logs", "night", "--lines", "1")
    assert "trainer        night step 2" in told
    assert "night step 1" not in told
    assert "listens" not in told
    assert "listens" not in said("logs", "night", "--process", "trainer")
    assert "orchestrator, trainer" in said("logs", "night", "--process", "rank", code=2)
    followed = said("logs", "bad", "--follow").splitlines()
    assert any(line.endswith("bad step 2") for line in followed)
    assert followed[-1].startswith("it failed ")
    assert REASON in followed[-1]


def test_the_logs_of_a_run_that_a_person_has_stopped_do_not_say_that_it_failed(said, tmp_path):
    RunFolder(tmp_path / "bad").write_failure(Stopped("ended by SIGTERM"))
    assert said("logs", "bad").splitlines()[-1] == "it stopped     ended by SIGTERM"
