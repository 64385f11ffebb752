"""A lock on a folder that goes with its holder, however that ends: no one else writes a run while it is held."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import BadInput

LOOK_S = 0.5
"""How often a lock that another process has is tried again."""


@contextmanager
def hold_lock(
    file: Path, what: str, wait_s: float, waiting: Callable[[str], None] = lambda message: None
) -> Iterator[None]:
    """Hold the lock file (made if need be) during the body; the kernel gives it back when this process dies.

    Waits up to `wait_s` seconds for another holder to end, and tells `waiting` so once. Raises BadInput naming `what`
    is locked and who has it. Works across nodes where the file system has flock (NFS has).
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(descriptor, what, wait_s, waiting)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, what: str, wait_s: float, waiting: Callable[[str], None]) -> None:
    deadline = time.monotonic() + wait_s
    told = False
    while not _try(descriptor):
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        if time.monotonic() > deadline:
            raise BadInput(
                f"{what} is in use by {holder}; wait for its end or cancel it"
                + (f" (waited {wait_s:.0f} s)" if wait_s else "")
            )
        if not told:
            waiting(f"{what} is in use by {holder}; waiting up to {wait_s:.0f} s for its end")
            told = True
        time.sleep(LOOK_S)


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
