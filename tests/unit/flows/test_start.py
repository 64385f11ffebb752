"""Signals while `metronome` loads its libraries."""

import signal
import subprocess
import sys
import time

import pytest

from support.runs import ROOT

LOADS = """
import sys, types
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "flows.cli":
            print("loading", flush=True)
            import time
            time.sleep(60)
sys.meta_path.insert(0, Slow())
from flows.main import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_libraries_are_loaded_ends_the_command_in_one_line(number):
    running = subprocess.Popen(
        [sys.executable, "-c", LOADS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True
    )
    with running:
        assert running.stdout.readline() == "loading\n"
        began = time.monotonic()
        running.send_signal(number)
        assert running.wait(timeout=20) == 130
        assert time.monotonic() - began < 10
        assert running.stderr.read() == f"\ninterrupted by {number.name}; nothing had started\n"


def test_the_console_script_is_the_command_line():
    done = subprocess.run(
        [sys.executable, "-c", "from flows.main import main; main()", "run", "missing.toml"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=100,
    )
    assert (done.returncode, "missing.toml: no such file" in done.stderr) == (2, True)
