"""Writes lines of the logs of a run's processes, and keeps the logs small, however long the run lasts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path

from engine.errors import LONGEST_TEXT, clean_text

LOG_BYTES = 64 * 2**20
"""A log of this size is moved to NAME.log.1, replacing the previous one."""
LONGEST_TRACEBACK = 10 * LONGEST_TEXT
"""Length in characters after which a traceback is cut: what was wrong stands at its end."""
EVERY_S = 1.0
"""Seconds between two checks of the logs' sizes: a process that prints 100 MB/s adds 100 MB in between."""


LOGGED = "METRONOME_LOGGED"
"""Environment variable of processes whose output goes to a log: their messages begin with the time."""
TIME_LENGTH = len("2026-11-27 22:00:00.000")


def log_line(text: str) -> None:
    """Print a message to stdout, cleaned (`engine.errors.clean_text`), in a log after the time."""
    print(_timed(clean_text(text)), flush=True)


def log_error(text: str) -> None:
    """The same to stderr, for what ends a process or goes wrong."""
    print(_timed(clean_text(text)), file=sys.stderr, flush=True)


def log_traceback(error: BaseException, where: str = "") -> None:
    """The same for an exception that is not ours, with its traceback. `where`: a line above it."""
    text = f"{where}\n" if where else ""
    text += "".join(traceback.format_exception(error)).rstrip()
    print(_timed(clean_text(text, LONGEST_TRACEBACK)), file=sys.stderr, flush=True)


def _timed(text: str) -> str:
    return f"{datetime.now().isoformat(' ', 'milliseconds')} {text}" if LOGGED in os.environ else text


def last_message(log: Path, start: str) -> str:
    """The last line of a log that begins with `start`, apart from its time; "" if there is none."""
    lines = log.read_text(errors="replace").splitlines()
    said = (line[TIME_LENGTH + 1 :] if line[TIME_LENGTH + 1 :].startswith(start) else line for line in reversed(lines))
    return next((line for line in said if line.startswith(start)), "")


class CleanFormatter(logging.Formatter):
    """Formats what a library logs, its tracebacks included, and cleans it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        return clean_text(super().format(record), LONGEST_TRACEBACK)


def clean_tracebacks() -> None:
    """From now on clean the traceback of every exception that nobody catches in this process, and what libraries log
    without a handler of their own. The text of an exception may be a model's or have a password."""
    sys.excepthook = lambda kind, error, trace: log_traceback(error)
    threading.excepthook = _log_thread
    sys.unraisablehook = _log_unraisable
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(CleanFormatter())


def _log_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and failed.exc_type is not SystemExit:
        log_traceback(failed.exc_value, f"exception in thread {failed.thread.name if failed.thread else 'unknown'}:")


def _log_unraisable(failed: sys.UnraisableHookArgs) -> None:
    if failed.exc_value is not None:
        log_traceback(failed.exc_value, f"{failed.err_msg or 'exception ignored in'}: {failed.object!r}")


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
