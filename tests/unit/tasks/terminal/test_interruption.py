"""Signals of a command's process."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from engine.config import Config
from engine.run.files import seal
from engine.run.folder import RunFolder
from support.runs import ROOT
from tasks.terminal import interruption

BLOCKED = """
import os
from tasks.terminal.interruption import catch_signals
catch_signals()
print("ready", flush=True)
try:
    while True:
        os.write(2, bytes(65536))
finally:
    print("first", flush=True)
    while True:
        os.write(2, bytes(65536))
"""


def test_a_second_signal_ends_a_process_whose_output_nobody_reads():
    running = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True
    )
    with running:
        assert running.stdout.readline() == "ready\n"
        time.sleep(0.3)  # the pipe is full
        running.send_signal(signal.SIGINT)
        assert running.stdout.readline() == "first\n"
        time.sleep(0.3)
        running.send_signal(signal.SIGTERM)
        try:
            assert running.wait(timeout=10) == 130
        finally:
            running.kill()


@pytest.mark.parametrize(
    ("number", "again"),
    [(None, "Ctrl-C again"), (signal.SIGINT, "Ctrl-C again"), (signal.SIGTERM, "another signal")],
)
def test_what_ends_it_at_once_is_called_by_what_came(monkeypatch, capsys, number, again):
    monkeypatch.setattr(interruption._command, "signal", number)
    interruption.say_stopping(9.0)
    assert capsys.readouterr().err.endswith(f"for up to 9 s; {again} ends at once\n")


@pytest.mark.parametrize(
    ("names", "saved"),
    [
        ([], "no checkpoint yet: training starts again at its first step"),
        (["damaged-step-000002"], "no whole checkpoint: without the damaged ones training starts again"),
    ],
)
def test_what_a_run_without_a_whole_checkpoint_has_saved(tmp_path, monkeypatch, names, saved):
    config = Config(run={"output": str(tmp_path), "name": "night"})
    folder = RunFolder(config.folder)
    for name in names:
        (folder.checkpoints / name).mkdir(parents=True)
    monkeypatch.setattr(interruption._command, "run", (config, "run"))
    assert interruption.how_on() == ""  # not begun
    folder.config.parent.mkdir(parents=True, exist_ok=True)
    folder.config.touch()
    assert f"saved       {saved}" in interruption.how_on()


@pytest.mark.parametrize(("steps", "saved"), [((1, 2, 3), 1), ((2, 3), None)])
def test_a_diverged_run_goes_on_from_a_checkpoint_from_before(tmp_path, monkeypatch, steps, saved):
    """The weights of step 2 are spoilt, which the update after step 1 made."""
    config = Config(run={"output": str(tmp_path), "name": "night"})
    folder = RunFolder(config.folder)
    folder.path.mkdir(parents=True)
    folder.config.touch()
    rewards = [0.4, 0.5, 0.0, 0.0]
    rows = [{**figures(reward), "step": step, "kl": step * 0.6} for step, reward in enumerate(rewards)]
    folder.steps.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for step in steps:
        a_checkpoint(folder, step)
    monkeypatch.setattr(interruption._command, "run", (config, "run"))
    told = interruption.how_on()
    if saved is None:
        assert "no checkpoint before it diverged: training starts again at its first step" in told
    else:
        assert re.search(r"step-000001, after 1 of \d+ steps before it diverged", told)
    resume = next(line for line in told.splitlines() if line.startswith("  resume "))
    assert re.search(r"rm -r \S*step-000002 \S*step-000003 && .*--resume .*--set train.learning_rate=0.1$", resume)


def figures(reward):
    return {
        "reward_mean": reward,
        "entropy": 0.1,
        "loss": 0.1,
        "grad_norm": 0.1,
        "old_ratio_max": 1.0,
        "learning_rate": 1.0,
    }


def a_checkpoint(folder, step):
    there = folder.checkpoints / f"step-{step:06}"
    there.mkdir(parents=True)
    (there / "state.json").write_text("{}")
    marker = {"step": step, "run": "0" * 32, "files": {"state.json": 2}}
    (there / "_SUCCESS.json").write_text(json.dumps(seal(marker)))
