"""Signals of a command's process."""

import signal
import subprocess
import sys
import time

from support.runs import ROOT

BLOCKED = """
import os
from tasks.interruption import catch
catch()
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
