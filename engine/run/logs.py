"""Writes lines of the logs of a run's processes."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from datetime import datetime
from pathlib import Path

from engine.errors import LONGEST_TEXT, clean_text

LONGEST_TRACEBACK = 10 * LONGEST_TEXT
"""Length in characters after which a traceback is cut: what was wrong stands at its end."""
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
