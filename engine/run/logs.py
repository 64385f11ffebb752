"""Logs of a run's processes, which stay small however long the run lasts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

LOG_BYTES = 64 * 2**20
"""A log of this size is put aside as NAME.log.1, which replaces the one before."""
EVERY_S = 30.0
"""Seconds between two looks at the sizes of the logs."""


def rotate_logs(folder: Path) -> None:
    """Put aside the logs in a folder that have grown too large.

    Their processes hold them open and append to them. So a log is copied and cut, not renamed; lines that are written
    between the two are lost.
    """
    for log in folder.glob("*.log"):
        if log.stat().st_size >= LOG_BYTES:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


@contextlib.asynccontextmanager
async def kept_small(folder: Path) -> AsyncIterator[None]:
    """`rotate_logs` the logs in a folder now and then within the block."""

    async def keep() -> None:
        while True:
            await asyncio.to_thread(rotate_logs, folder)
            await asyncio.sleep(EVERY_S)

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
