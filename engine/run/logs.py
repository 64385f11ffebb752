"""Keeps the logs of a run's processes small, however long the run lasts."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

LOG_BYTES = 64 * 2**20
"""A log of this size is moved to NAME.log.1, replacing the previous one."""
EVERY_S = 1.0
"""Seconds between two checks of the logs' sizes: a process that prints 100 MB/s adds 100 MB in between."""


def rotate_logs(folder: Path) -> None:
    """Move aside the last `LOG_BYTES` of the logs in a folder that have grown too large.

    Processes hold their logs open and append to them. So a log is copied and truncated, not renamed; lines written in
    between are lost.
    """
    for log in folder.glob("*.log"):
        if (size := log.stat().st_size) >= LOG_BYTES:
            with log.open("rb") as grown, log.with_name(f"{log.name}.1").open("wb") as aside:
                grown.seek(size - LOG_BYTES)
                aside.write(grown.read(LOG_BYTES))
            os.truncate(log, 0)


@contextlib.asynccontextmanager
async def kept_small(folder: Path) -> AsyncIterator[None]:
    """Call `rotate_logs` on a folder every `EVERY_S` seconds during the block."""

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
