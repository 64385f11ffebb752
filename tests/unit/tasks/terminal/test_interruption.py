"""Signals of a command's process."""

import signal
import subprocess
import sys
import time

import pytest

from engine.config import Config
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
