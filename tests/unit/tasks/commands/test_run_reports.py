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
from engine.run.run_file import update_run
from flows.cli import app
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
