"""Which errors mean that MLflow does not answer, and how to wait for it when a run cannot continue without it."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import time
from collections.abc import Callable
from typing import TypeVar

import mlflow
from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy.exc import OperationalError

from engine.errors import MetronomeError, clean_line
from tasks.terminal.console import print_error

AWAY_S = 300.0
"""Seconds to wait for MLflow. A server that restarts or fails over is back by then."""
RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between attempts while MLflow does not answer; the last value repeats."""
CONFLICT_S = (0.1, 0.3, 1.0)
"""Seconds between attempts while another writer makes the same rows."""
_CONFLICT = re.compile(r"UNIQUE constraint failed|UniqueViolation|duplicate key value|Duplicate entry")
"""What SQLite, PostgreSQL and MySQL say of a row that another writer has made since this one looked for it. MLflow
calls that a bad request."""

Result = TypeVar("Result")


class TrackingAway(MetronomeError):
    """MLflow did not answer for as long as a run waits for it. It may answer when the run is resumed."""


def _store_errors() -> tuple[type[Exception], ...]:
    """The errors that MLflow's tracking and artifact stores raise. Errors of the library requests are OSErrors; that of
    a locked database is raw only while MLflow opens the store."""
    common = (mlflow.MlflowException, OSError, ImportError, BotoCoreError, ClientError, OperationalError)
    if importlib.util.find_spec("boto3") is None:
        return common
    return *common, importlib.import_module("boto3.exceptions").Boto3Error


STORE_ERRORS = _store_errors()


def is_refused(error: Exception) -> bool:
    """Whether a retry is pointless, because the request is wrong (4xx), or a file or a module is missing. A conflict
    with another writer is no wrong request."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, mlflow.MlflowException):
        status = error.get_http_status_code()
    wrong = status is not None and 400 <= status < 500 and status not in (408, 429)
    return (wrong and not _CONFLICT.search(str(error))) or isinstance(error, FileNotFoundError | ImportError)


def retry_conflicts(action: Callable[[], Result]) -> Result:
    """Return the result of a call to MLflow, repeating it a few times while another writer makes the same rows, or the
    same experiment or model. The action must be safe to repeat: it then finds what the other one has made."""
    for pause in CONFLICT_S:
        try:
            return action()
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS" and not _CONFLICT.search(str(error)):
                raise
        time.sleep(pause)
    return action()


def first_line(error: Exception) -> str:
    """The first line of a message, at most 300 characters."""
    return clean_line((str(error).splitlines() or [type(error).__name__])[0])[:300]


def retry_while_away(what: str, action: Callable[[], Result]) -> Result:
    """Return the result of a call to MLflow, repeating it for up to `AWAY_S` seconds while MLflow does not answer.

    The action must be safe to repeat. Raises TrackingAway naming `what`. If MLflow refuses the call, its own error is
    raised.
    """
    deadline = time.monotonic() + AWAY_S
    for number, pause in enumerate(itertools.chain(RETRY_S, itertools.repeat(RETRY_S[-1]))):
        try:
            return retry_conflicts(action)
        except STORE_ERRORS as error:
            if is_refused(error):
                raise
            if time.monotonic() + pause > deadline:
                raise TrackingAway(f"{what}: MLflow did not answer for {AWAY_S:.0f} s: {first_line(error)}") from error
            if number == 0:
                print_error(
                    f"warning: {what}: MLflow does not answer: {first_line(error)}. Waiting up to {AWAY_S:.0f} s for it"
                )
        time.sleep(pause)
    raise AssertionError("the pauses never end")
