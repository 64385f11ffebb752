"""What a process says of a full or broken disk and of too many open files, and its limit of open files: each response
in flight is a socket, in the orchestrator and in its instance."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import DiskError, TooManyFiles

NO_FILE = (errno.EMFILE, errno.ENFILE)
"""Numbers of the errors that say that no further file can be opened."""
KINDS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, *NO_FILE)
ENOUGH = 65_536
"""The soft limit is raised to the hard limit, but not beyond this, because some programs loop over every number up to
it."""


@contextmanager
def named_disk_errors(folder: Path) -> Iterator[None]:
    """Raise DiskError if the body fails because the disk of the run folder is full or broken, and TooManyFiles if it
    can't open another file."""
    try:
        yield
    except (OSError, ExceptionGroup) as error:
        if (cause := _cause(error)) is None:
            raise
        what = os.strerror(cause.errno or 0)
        if cause.errno in NO_FILE:
            raise TooManyFiles(
                f"run folder {folder}: {what} in this process, whose limit is {open_limit()}; raise it (ulimit -Hn) or "
                "lower rollout.concurrency, then resume the run; it continues from its newest checkpoint"
            ) from None
        raise DiskError(
            f"run folder {folder}: {what} ({_free(folder)}); free space there, then resume the run; it continues from "
            "its newest checkpoint"
        ) from None


def _cause(error: Exception) -> OSError | None:
    if isinstance(error, ExceptionGroup):
        return next(filter(None, map(_cause, error.exceptions)), None)
    return error if isinstance(error, OSError) and error.errno in KINDS else None


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free on its disk"


def reachable_limit() -> int:
    """How many files this process can allow itself to open without more rights: the hard limit, at most ENOUGH."""
    soft, hard = (
        ENOUGH if one == resource.RLIM_INFINITY else one for one in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return max(soft, min(hard, ENOUGH))


def open_limit() -> int:
    """How many files this process may open now."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> None:
    """Raise the soft limit, often 1,024, to `reachable_limit`. Processes that this one starts inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < reachable_limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable_limit(), hard))
