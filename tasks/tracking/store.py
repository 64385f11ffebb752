"""MLflow's store: how to make one, which errors mean that it does not answer, and how to wait for it when a run cannot
continue without it.

An sqlite store is made whole or not at all, also when the command that makes it is killed. MLflow creates it by dozens
of migrations, which take seconds; a file that a kill has left incomplete would be refused by every later call.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import mlflow
from botocore.exceptions import BotoCoreError, ClientError
from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy.exc import OperationalError

from engine.errors import MetronomeError, clean_line
from engine.run.files import sync_folder
from engine.run.lock import hold_lock
from tasks.terminal.console import print_error

SCHEME = "sqlite:///"
WAIT_S = 120.0
"""Seconds to wait for another process that is creating the store (about ten times what that takes)."""

# do not log the migrations of a new store
logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("alembic").setLevel(logging.WARNING)


def sqlite_file(uri: str) -> Path | None:
    """The file of an sqlite store; None for another kind of store."""
    return Path(uri.removeprefix(SCHEME)) if uri.startswith(SCHEME) else None


def whole_store(uri: str) -> str:
    """Return `uri` once its store is there: an absent sqlite file is created, complete."""
    file = sqlite_file(uri)
    if file is not None and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(file.with_name(f".{file.name}.lock"), f"the tracking store {file}", WAIT_S, print_error):
            if not file.exists():
                _create(file)
    return uri


def _create(file: Path) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.unlink(missing_ok=True)  # sqlite itself drops the journal of an absent file
    store = SqlAlchemyStore(f"{SCHEME}{partial}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
    store.engine.dispose()
    partial.chmod(0o600)
    partial.rename(file)
    sync_folder(file.parent)


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


STORE_ERRORS: tuple[type[Exception], ...] = (mlflow.MlflowException, OSError, ImportError, BotoCoreError, ClientError)
STORE_ERRORS += (OperationalError,)
"""The errors that MLflow's tracking and artifact stores raise. Errors of the library requests are OSErrors; that of a
locked database is raw only while MLflow opens the store."""
if importlib.util.find_spec("boto3") is not None:
    STORE_ERRORS += (importlib.import_module("boto3.exceptions").Boto3Error,)


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
