"""A lock on a run folder. Only its holder and the processes that it gives the open file to write the run. The kernel
releases it when all of them have ended, however they end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import BadInput

LOOK_S = 0.5
"""Seconds between two attempts to take a lock that another process holds."""
ENDING_S = 30.0
"""Seconds to wait for a lock whose holder is gone: its orchestrator, which has the open file, ends within a second or
two."""


@contextmanager
def hold_lock(
    file: Path,
    what: str,
    wait_s: float,
    waiting: Callable[[str], None] = lambda message: None,
    progress: Callable[[], object] = lambda: None,
) -> Iterator[int]:
    """Hold the lock file during the body, and yield the open file, whose heirs hold the lock, too. The lock file is
    created if needed. The kernel releases it when these processes die.

    Only its owner can open the file, because whoever can open it can hold the lock. Waits up to `wait_s` seconds for
    another holder to end (`ENDING_S` if it is gone, but not its heirs), and calls `waiting` once with a message. The
    wait starts over whenever `progress` returns a new value. Raises BadInput, naming `what` is locked and the holder,
    or whose it is if another user owns it. Works across nodes if the file system supports flock (NFS does).
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
        _sign(descriptor)
        yield descriptor
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


@contextmanager
def share_lock(file: Path, what: str) -> Iterator[None]:
    """Hold the lock file during the body together with others that share it, so that `hold_lock` is refused. Does
    nothing in a folder where this user may not write. Raises BadInput if a process holds the lock alone."""
    with _opened(file, os.O_RDWR | os.O_CREAT) as descriptor:
        if descriptor is not None:
            if not _try(descriptor, fcntl.LOCK_SH):
                raise BadInput(f"{what} is in use by {_holder(descriptor)}; wait for its end")
            _sign(descriptor)
        yield


def check_not_held(file: Path, what: str) -> None:
    """Raise BadInput, like `hold_lock` without waiting, if another process holds the lock. One that is gone does not
    count: its heirs end within a second or two. Writes nothing. Says nothing of a lock that only another user can
    open."""
    with _opened(file, os.O_RDWR, absent=(FileNotFoundError, PermissionError)) as descriptor:
        if descriptor is not None and not _try(descriptor) and _is_alive(holder := _holder(descriptor)):
            raise BadInput(f"{what} is in use by {holder}; wait for its end or cancel it")


def is_held(file: Path) -> bool:
    """Whether a process is seen to hold the lock alone. For an instant this shares the lock."""
    with _opened(file, os.O_RDONLY) as descriptor:
        return descriptor is not None and not _try(descriptor, fcntl.LOCK_SH)


@contextmanager
def _opened(
    file: Path, flags: int, absent: type[OSError] | tuple[type[OSError], ...] = OSError
) -> Iterator[int | None]:
    """The open file during the body; None if this raises an error of the kind `absent`."""
    try:
        descriptor = os.open(file, flags | os.O_CLOEXEC, 0o600)
    except absent:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _take(
    descriptor: int,
    what: str,
    wait_s: float,
    waiting: Callable[[str], None],
    progress: Callable[[], object],
) -> None:
    began = time.monotonic()
    reached = progress()
    told = False
    while not _try(descriptor):
        if (now := progress()) != reached:
            reached = now
            began = time.monotonic()
        holder = _holder(descriptor)
        patience_s = wait_s if _is_alive(holder) else max(wait_s, ENDING_S)
        if time.monotonic() > began + patience_s:
            raise BadInput(
                f"{what} is in use by {holder}; wait for its end or cancel it"
                + (f" (waited {patience_s:.0f} s)" if patience_s else "")
            )
        if not told and patience_s:
            waiting(f"{what} is in use by {holder}; waiting up to {patience_s:.0f} s for its end")
            told = True
        time.sleep(LOOK_S)


def _sign(descriptor: int) -> None:
    """Write into the lock file who holds it."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _holder(descriptor: int) -> str:
    """Who took the lock, by the name in its file."""
    return os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"


def _is_alive(holder: str) -> bool:
    """Whether the process of such a name may live. Of one on another machine that is not known."""
    named = re.fullmatch(r"process (\d+) on (.*)", holder)
    if named is None or named[2] != socket.gethostname():
        return named is not None
    try:
        os.kill(int(named[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _owner(file: Path) -> str:
    """Return whose the file is, or the folder in which it would be made; empty if that cannot be seen either."""
    with contextlib.suppress(OSError, KeyError):
        there = next(path for path in (file, *file.parents) if path.exists())
        return f"; {there} is {there.owner()}'s"
    return ""


def _try(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
