"""Ends what a reward has started. None of it survives its worker, in any session or process group.

The process that the orchestrator started forks. The child becomes the worker, and the parent stays as its guardian. The
kernel gives the guardian every orphan among the worker's descendants (PR_SET_CHILD_SUBREAPER), so it finds all of them.
The guardian ends when the worker ends, with the same status. It ends the worker when the orchestrator ends: the
worker's own thread (engine.run.process) can't while a reward holds the interpreter lock. Only Linux can do this.

The guardian also counts the descendants, and ends all of them if there are too many. RLIMIT_NPROC would count the
processes of the whole user, and none of root's; a separate cgroup is not available everywhere. What a reward starts
between two looks is not prevented.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from engine.wire.verifier_messages import TOO_MANY_PROCESSES

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
END_S = 5.0
"""Seconds that the guardian spends on ending the worker's descendants."""
LOOK_S = 0.1
"""Seconds between two counts of the descendants. A count takes 0.1 ms, and 0.02 ms more for each thread."""


def start_guardian(connection: int, limit: int = 0) -> None:
    """Fork, and return in the worker; the guardian does not return. On systems other than Linux, return at once.

    `connection`: descriptor that only the worker uses. `limit`: maximum number of processes that the worker may have
    started at once; 0: no limit. Call it before any thread is started.
    """
    if sys.platform != "linux":
        return
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    guardian = os.getpid()
    worker = os.fork()
    if worker:
        os.close(connection)
        _outlive(worker, limit)
    os.setpgid(0, 0)  # signals that end the worker's group must not reach the guardian
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:  # the guardian died before PR_SET_PDEATHSIG was set
        os._exit(1)


def _outlive(worker: int, limit: int) -> NoReturn:
    """Wait until the worker or the orchestrator ends, or the worker has too many descendants. End these, then end with
    the worker's status or with TOO_MANY_PROCESSES."""
    orchestrator = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _send(worker, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    too_many = False
    while (status := _reap(worker)) is None and not too_many and os.getppid() == orchestrator:
        too_many = bool(limit) and len(_descendants()) > limit + 1  # and the worker
        if not too_many:
            signal.sigtimedwait({signal.SIGCHLD}, LOOK_S)
    _end()
    if status is None:
        os._exit(TOO_MANY_PROCESSES)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # the handler of SIGKILL can't be set
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _reap(worker: int) -> int | None:
    """Wait for the children that have ended. Return the worker's status if it is among them, else None."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == worker:
                status = found[1]
    return status


def _end() -> None:
    """End all descendants, again and again while there are new ones."""
    deadline = time.monotonic() + END_S
    while (left := _descendants()) and time.monotonic() < deadline:
        for process in left:
            _send(process, signal.SIGKILL)
        _reap(0)
        time.sleep(0.002)


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _descendants() -> list[int]:
    """Return the ids of all descendants, including those that have ended and were not waited for.

    One that ends meanwhile may hide others. These then are this process's own children, which the next look finds.
    """
    found = _children(os.getpid())
    for process in found:
        found += _children(process)
    return found


def _children(process: int) -> list[int]:
    """Return the children of all threads of a process (Linux 3.5, CONFIG_PROC_CHILDREN). All of /proc would take long
    on a large machine."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def _prctl(option: int, value: int) -> None:
    arguments = (option, value, 0, 0, 0)
    if ctypes.CDLL(None, use_errno=True).prctl(*arguments):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
