"""Creates MLflow's sqlite store so that it is complete or absent, even when the command that creates it is killed.

MLflow creates a store by dozens of migrations, which take seconds. If a kill leaves the file incomplete, every later
call refuses it ("out-of-date database schema").
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from pathlib import Path

from mlflow.store.db.utils import _get_latest_schema_revision
from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from engine.run.files import sync_folder
from engine.run.lock import hold_lock
from tasks.console import print_error

SCHEME = "sqlite:///"
WAIT_S = 120.0
"""Seconds to wait for another process that is creating the store (about ten times what that takes), or that locks it,
as a backup does."""

_whole: set[str] = set()
"""URIs of the stores that this process has found complete."""

# do not log the migrations of a new store
logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("alembic").setLevel(logging.WARNING)


def sqlite_file(uri: str) -> Path | None:
    """The file of an sqlite store; None for another kind of store."""
    return Path(uri.removeprefix(SCHEME)) if uri.startswith(SCHEME) else None


def whole_store(uri: str) -> str:
    """Return `uri` once its store is complete. An absent sqlite file is created; an incomplete one, left by a kill, is
    moved aside and created again. A store with runs, and any other kind of store, is left to MLflow."""
    file = sqlite_file(uri)
    if file is not None and uri not in _whole:
        file.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(file.with_name(f".{file.name}.lock"), f"the tracking store {file}", WAIT_S, print_error):
            _make_whole(file)
        _whole.add(uri)
    return uri


def _make_whole(file: Path) -> None:
    if file.exists():
        if _is_whole(file):
            return
        aside = file.with_name(f"{file.name}.half-made-{time.strftime('%Y%m%d-%H%M%S')}")
        file.rename(aside)
        print_error(
            f"warning: the tracking store {file} was only half created and had no runs; it is kept as {aside.name}"
        )
    partial = file.with_name(f".{file.name}.partial")
    partial.unlink(missing_ok=True)  # sqlite itself drops the journal of an absent file
    store = SqlAlchemyStore(f"{SCHEME}{partial}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
    store.engine.dispose()
    partial.rename(file)
    sync_folder(file.parent)


def _is_whole(file: Path) -> bool:
    """Whether all migrations were made. A store that has runs, or that sqlite cannot read, also counts; MLflow reports
    what is wrong with it."""
    with contextlib.closing(sqlite3.connect(file, timeout=WAIT_S)) as store:
        try:
            return (
                _first(store, "SELECT 1 FROM runs") is not None
                or _first(store, "SELECT version_num FROM alembic_version") == _get_latest_schema_revision()
            )
        except sqlite3.DatabaseError:
            return True


def _first(store: sqlite3.Connection, query: str) -> object:
    """The first value of a query; None if there is no row or no such table."""
    try:
        return next((row[0] for row in store.execute(query)), None)
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return None
        raise
