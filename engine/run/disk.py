"""Turns errors of a full or broken disk, and of too many open files, into one sentence."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import DiskError, TooManyFiles
from engine.run.open_files import NO_FILE, open_limit

KINDS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, *NO_FILE)


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
