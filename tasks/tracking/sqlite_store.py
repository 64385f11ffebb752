"""Creates MLflow's sqlite store so that it is complete or absent, even when the command that creates it is killed.

MLflow creates a store by dozens of migrations, which take seconds. If a kill leaves the file incomplete, every later
call refuses it ("out-of-date database schema").
"""

from __future__ import annotations

import logging
from pathlib import Path

from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

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
    """Return `uri` once its store is there: an absent sqlite file is created."""
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
    partial.rename(file)
    sync_folder(file.parent)
