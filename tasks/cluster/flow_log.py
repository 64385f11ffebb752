"""Fills the Logs tab of a flow run with what the console shows, without Prefect's own lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.logging.handlers import APILogHandler, emit_api_log
from prefect.runtime import flow_run

from engine.errors import MetronomeError
from tasks import console

NAME = "metronome"
"""Name of the logger in the tab."""


class _Handler(APILogHandler):
    """Sends each record. (Prefect's own lines stay off, because each would be a request; see tasks/__init__.py.)"""

    def emit(self, record: logging.LogRecord) -> None:
        """Put the record into Prefect's queue, from which a thread sends several at once."""
        emit_api_log(self.prepare(record))


@contextmanager
def send_output() -> Iterator[None]:
    """During the body, send Prefect everything that is printed, and the error that ends the body. At the end, the rest
    is sent within at most 5 s."""
    if not (number := flow_run.id):
        yield
        return
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
