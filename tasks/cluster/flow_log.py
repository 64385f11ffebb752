"""Fills the Logs tab of a flow run with what the console shows, without Prefect's own lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.logging.handlers import APILogHandler, emit_api_log
from prefect.runtime import flow_run

from engine.errors import MetronomeError
from tasks.terminal import console

NAME = "metronome"
"""Name of the logger in the tab."""


class _Handler(APILogHandler):
    """Sends each record. (Prefect's own lines stay off, because each would be a request; see tasks/__init__.py.)"""

    def emit(self, record: logging.LogRecord) -> None:
        """Put the record into Prefect's queue, from which a thread sends several at once."""
        emit_api_log(self.prepare(record))


def shorten_line(record: logging.LogRecord) -> bool:
    """Filter of Prefect's own lines: without the count of retries, which has no meaningful end, and without "Crash
    detected!" where a signal ended the run, as a cancellation does; its state says so."""
    if isinstance(record.msg, str) and "Retry %s/%s" in record.msg and isinstance(record.args, tuple):
        record.msg = record.msg.replace("Retry %s/%s", "retry %s")
        record.args = (*record.args[:3], *record.args[4:])
    return not (str(record.msg).startswith("Crash detected!") and "signal" in str(record.msg))


@contextmanager
def send_output() -> Iterator[None]:
    """During the body, send Prefect everything that is printed, and the error that ends the body. At the end, the rest
    is sent within at most 5 s."""
    if not (number := flow_run.id):
        yield
        return
    for name in ("prefect.task_runs", "prefect.flow_runs"):
        logging.getLogger(name).addFilter(shorten_line)
    handler = _Handler()
    handler.setFormatter(logging.Formatter("%(message)s"))

    def send(level: int, text: str) -> None:
        record = logging.makeLogRecord({"name": NAME, "levelno": level, "msg": text, "flow_run_id": number})
        handler.handle(record)

    try:
        with console.heard_by(send):
            yield
    except MetronomeError as error:
        send(logging.ERROR, f"error: {error}")
        raise
    finally:
        handler.flush()
