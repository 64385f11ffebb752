"""Ctrl-C and SIGTERM in a training: what is saved, how it goes on, and a second one that ends at once."""

import json
import os
import pty
import shlex
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from engine.run.checkpoint_files import latest_checkpoint, step_of
from engine.run.files import read_lines
from support.runs import ROOT, Tree, overrides, send, wait_for

pytestmark = pytest.mark.timeout(900)  # more than the waits of one test together, of which a busy machine needs most


class Terminal:
    """Reads all that is printed on a terminal, as a real one does: its buffer is small, and who prints would wait."""

    def __init__(self):
        self._ours, self.theirs = pty.openpty()
        self._parts = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        try:
            while part := os.read(self._ours, 4096):
                self._parts.append(part)
        except OSError:  # EIO: its other end is closed
            pass
        os.close(self._ours)

    def shown(self):
        """All that was printed, once the processes have ended."""
        self._reader.join(20)
        return b"".join(self._parts).decode().replace("\r\n", "\n")


@contextmanager
def training(arguments, steps_file, steps):
    """`metronome` with these arguments, on a terminal, once it has trained `steps`: (process, the terminal)."""
    terminal = Terminal()
    running = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments],
        stdout=terminal.theirs,
        stderr=terminal.theirs,
        cwd=ROOT,
        close_fds=True,
    )
    os.close(terminal.theirs)
    try:
        wait_for(lambda: len(list(read_lines(steps_file))) >= steps, f"step {steps}", 300)
        yield running, terminal
    finally:
        running.kill()
        running.wait()


def section(text, name):
    return next(line.removeprefix(f"  {name}").strip() for line in text.splitlines() if line.startswith(f"  {name} "))


@pytest.mark.parametrize(
    "number", [pytest.param("SIGINT", marks=pytest.mark.slow), pytest.param("SIGTERM", marks=pytest.mark.nightly)]
)
def test_a_training_that_is_interrupted_says_how_it_goes_on_and_a_second_signal_ends_it_at_once(
    settings, tmp_path, number
):
    run = tmp_path / "run"
    sets = [part for one in overrides(settings | {"train.steps": 100_000}) for part in ("--set", one)]
    with training(["train", "infra/recipes/quickstart.toml", *sets], run / "steps.jsonl", 2) as (flow, terminal):
        tree = Tree(flow.pid)
        send(flow, number)
        assert flow.wait(timeout=60) == 130
        assert tree.left() == []
        text = terminal.shown()
    assert "\nstopping: the trainer saves the weights from before this step" in text
    assert f"\ninterrupted by {number}\n" in text
    assert "Traceback" not in text
    saved = latest_checkpoint(run / "checkpoints")
    assert section(text, "saved") == f"{saved}, after {step_of(saved)} of 100,000 steps"
    assert section(text, "log") == str(run / "logs/orchestrator.log")
    assert json.loads((run / "failure.json").read_text())["message"] == f"ended by {number}"
    assert "trainer-0" in (run / "timeline.html").read_text()

    program, *arguments = shlex.split(section(text, "resume"))
    assert program.startswith("/")
    assert f"run.output={tmp_path}" in arguments
    with training(arguments, run / "steps.jsonl", step_of(saved) + 2) as (flow, terminal):
        tree = Tree(flow.pid)
        send(flow, number)
        time.sleep(0.3)
        began = time.monotonic()
        send(flow, number)
        assert flow.wait(timeout=20) == 130
        assert time.monotonic() - began < 3
        assert tree.left() == []
        assert "\nstopped at once; its processes end within seconds: " in terminal.shown()
