"""Ends what a reward has started: nothing of it survives its worker, whatever session or process group it went to.

The process that the launcher started forks. The child becomes the worker. The parent stays as its guardian: the kernel
gives it every orphan among the worker's descendants (PR_SET_CHILD_SUBREAPER), so it finds all of them. It ends when the
worker ends, and as it ended. Only Linux can do this.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
END_S = 5.0
"""Seconds that the guardian tries to end the worker's descendants."""


def guard(connection: int) -> None:
    """Fork, and return in the worker; the guardian does not return. Elsewhere than on Linux return at once.

    `connection`: descriptor of the worker's alone. Call it before any thread is started.
    """
    if sys.platform != "linux":
        return
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    guardian = os.getpid()
    worker = os.fork()
    if worker:
        os.close(connection)
        _outlive(worker)
    os.setpgid(0, 0)  # what ends the worker's group must leave the guardian
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:  # it died before the kernel knew that this matters
        os._exit(1)


def _outlive(worker: int) -> NoReturn:
    """Wait for the worker's end, end its descendants, and end as the worker did."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _kill(worker))
    ended = 0
    while ended != worker:
        ended, status = os.waitpid(-1, 0)
    deadline = time.monotonic() + END_S
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for process in left:
            _kill(process)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # that of SIGKILL can't be set
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Ids of a process's children, of theirs and so on, also of those that have ended and were not waited for."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            _, _, after_name = stat.read_text(errors="replace").rpartition(")")
            children[int(after_name.split()[1])].append(int(stat.parent.name))
    found = list(children[root])
    for process in found:
        found += children[process]
    return found


def _prctl(option: int, value: int) -> None:
    arguments = (option, value, 0, 0, 0)
    if ctypes.CDLL(None, use_errno=True).prctl(*arguments):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
