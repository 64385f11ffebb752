"""A lock on a run folder. Only its holder writes the run. The kernel releases it when the holder ends, however it
ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import BadInput

LOOK_S = 0.5
"""Seconds between two attempts to take a lock that another process holds."""


@contextmanager
def hold_lock(
    file: Path,
    what: str,
    wait_s: float,
    waiting: Callable[[str], None] = lambda message: None,
    progress: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Hold the lock file during the body; it is created if needed. The kernel releases it when this process dies.

    Only its owner can open the file, because whoever can open it can hold the lock. Waits up to `wait_s` seconds for
    another holder to end, and calls `waiting` once with a message. The wait starts over whenever `progress` returns a
    new value. Raises BadInput, naming `what` is locked and the holder, or whose it is if another user owns it. Works
    across nodes if the file system supports flock (NFS does).
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError as error:
        raise BadInput(f"{what} cannot be locked: {error.strerror} ({file}{_owner(file)})") from None
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600)
        _take(descriptor, what, wait_s, waiting, progress=progress)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _named(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def share_lock(file: Path, what: str) -> Iterator[None]:
    """Hold the lock file during the body together with others that share it, so that `hold_lock` is refused. Does
    nothing in a folder where this user may not write. Raises BadInput if a process holds the lock alone."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        if not _try(descriptor, fcntl.LOCK_SH):
            raise BadInput(f"{what} is in use by {_holder(descriptor)}; wait for its end")
        yield
    finally:
        os.close(descriptor)


def check_not_held(file: Path, what: str) -> None:
    """Raise BadInput, like `hold_lock` without waiting, if another process holds the lock. Writes nothing. Of a lock
    that only another user can open it is known whether a process of this machine holds it."""
    if not file.exists():
        return
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        if (process := _holding_process(file.stat())) is not None:
            raise BadInput(f"{what} is in use by {_named(process)}; wait for its end or cancel it") from None
        return
    try:
        _take(descriptor, what, 0.0, lambda message: None)
    finally:
        os.close(descriptor)


def _take(
    descriptor: int,
    what: str,
    wait_s: float,
    waiting: Callable[[str], None],
    progress: Callable[[], object] = lambda: None,
) -> None:
    deadline = time.monotonic() + wait_s
    reached = progress()
    told = False
    while not _try(descriptor):
        if (now := progress()) != reached:
            reached = now
            deadline = time.monotonic() + wait_s
        holder = _holder(descriptor)
        if time.monotonic() > deadline:
            raise BadInput(
                f"{what} is in use by {holder}; wait for its end or cancel it"
                + (f" (waited {wait_s:.0f} s)" if wait_s else "")
            )
        if not told:
            waiting(f"{what} is in use by {holder}; waiting up to {wait_s:.0f} s for its end")
            told = True
        time.sleep(LOOK_S)


def _holder(descriptor: int) -> str:
    """Return who holds the lock: a process of this machine by /proc/locks, else who wrote its name into the file. That
    may be another one, which has ended since."""
    if (process := _holding_process(os.fstat(descriptor))) is not None:
        return _named(process)
    return os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"


def _named(process: int) -> str:
    return f"process {process} on {socket.gethostname()}"


def _owner(file: Path) -> str:
    """Return whose the file is, or the folder in which it would be made; empty if that cannot be seen either."""
    with contextlib.suppress(OSError, KeyError):
        there = next(path for path in (file, *file.parents) if path.exists())
        return f"; {there} is {there.owner()}'s"
    return ""


def is_seen_held(file: Path) -> bool:
    """Whether a process of this machine is seen to hold the lock. Takes nothing, so it is in nobody's way."""
    return file.exists() and _holding_process(file.stat()) is not None


def _holding_process(file: os.stat_result) -> int | None:
    """The process of this machine that holds a file's lock by /proc/locks; None if none is seen there."""
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            # "1: FLOCK ADVISORY WRITE 4711 08:02:131081 0 EOF"; that of a process that waits has "->" after the number
            _, kind, _, _, process, locked, *_ = line.split()
            if kind == "FLOCK" and locked == device and int(process) > 0:
                return int(process)
    return None


def _try(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
