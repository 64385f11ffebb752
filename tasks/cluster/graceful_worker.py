"""Prefect's worker of a pool of type process, whose runs save a checkpoint when it is stopped.

`python -m tasks.cluster.graceful_worker --pool POOL [OPTION]...` takes the options of `prefect worker start`, which
kills the processes of its runs when it is stopped. This one ends them by SIGTERM first. A run that ends so is Crashed,
and the watchdog resumes it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import psutil

from engine.run.logs import log_line
from engine.run.process import python_command

GRACE_S = 50.0
"""Seconds that runs have to save and end, less than the 60 s after which infra/ has a worker killed."""
FLOW_RUN = "PREFECT__FLOW_RUN_ID"


def main() -> int:
    """Work until SIGTERM, Ctrl-C or the worker's own end. Returns the worker's exit status, or 0."""
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    # in a session of its own, or Ctrl-C would reach it as well
    worker = subprocess.Popen(python_command("prefect", "worker", "start", *sys.argv[1:]), start_new_session=True)
    while not asked.wait(0.5):
        if worker.poll() is not None:
            return worker.returncode
    log_line(f"stopping: the runs save a checkpoint, for up to {GRACE_S:g} s")
    end_runs(worker.pid)
    worker.terminate()
    worker.wait()
    return 0


def end_runs(worker: int) -> None:
    """Send SIGTERM to the processes of flow runs that the process `worker` has started, and wait for their ends."""
    runs = [child for child in psutil.Process(worker).children() if FLOW_RUN in child.environ()]
    for run in runs:
        run.terminate()
    psutil.wait_procs(runs, timeout=GRACE_S)


if __name__ == "__main__":
    sys.exit(main())
