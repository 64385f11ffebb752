"""Copies a folder of runs with its databases, also while servers and runs are using it:

    python infra/backup.py runs /backup/2026-11-27        save
    python infra/backup.py /backup/2026-11-27 runs        restore, to where it was, with servers and workers stopped

Every sqlite database (Prefect's, MLflow's) is copied by sqlite's own backup, so that it is whole. The databases come
first: what they name is then among the files, which are copied after them. The new folder is complete or absent.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

JOURNALS = ("-wal", "-shm", "-journal")
"""Ends of the names of files that belong to an open database: the backup has their content."""
LOCKED_S = 60.0
"""Seconds that a database may stay locked by another process."""
POLL_S = 0.5
"""Seconds that an attempt to copy a locked database takes."""


def copy_folder(source: Path, target: Path) -> None:
    """Copy `source` to the new folder `target`. A file that vanishes meanwhile is left out. Ends with a message if
    `source` is no folder, if `target` exists or is in it, or if a database stays locked for `LOCKED_S` seconds. Until
    they have the modes of `source`, the copies are readable only by their owner."""
    if not source.is_dir():
        sys.exit(f"error: {source}: no such folder")
    if target.exists():
        sys.exit(f"error: {target} exists; give a new folder, or move this one away")
    if target.resolve().is_relative_to(source.resolve()):
        sys.exit(f"error: {target} is in {source}, and would be copied into itself; give a folder outside of it")
    os.umask(0o077)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    databases = [path for path in source.rglob("*") if is_database(path)]
    for database in databases:
        copy = partial / database.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with (
            contextlib.closing(sqlite3.connect(database, POLL_S)) as there,
            contextlib.closing(sqlite3.connect(copy)) as here,
        ):
            there.backup(here, progress=deadline_of(database))
        shutil.copystat(database, copy)
    done = {*databases, *(Path(f"{database}{end}") for database in databases for end in JOURNALS)}
    for path in sorted(source.rglob("*")):
        copy = partial / path.relative_to(source)
        with contextlib.suppress(FileNotFoundError):
            if path.is_symlink():
                copy.symlink_to(path.readlink())
            elif path.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
                copy.chmod(path.stat().st_mode & 0o777)
            elif path.is_file() and path not in done:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
    shutil.copymode(source, partial)
    partial.rename(target)


def deadline_of(database: Path) -> Callable[[int, int, int], None]:
    """What sqlite calls after each attempt to copy a database. Ends with a message after `LOCKED_S` seconds, because
    sqlite itself would wait for the lock for ever."""
    deadline = time.monotonic() + LOCKED_S

    def check(status: int, remaining: int, total: int) -> None:
        if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) and time.monotonic() > deadline:
            sys.exit(
                f"error: {database} has been locked by another process for {LOCKED_S:g} s; stop that process, for "
                "example a database upgrade, and start the backup again"
            )

    return check


def is_database(path: Path) -> bool:
    """Whether a file is an sqlite database."""
    with contextlib.suppress(OSError):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                return file.read(16) == b"SQLite format 3\0"
    return False


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python infra/backup.py FROM TO")
    copy_folder(Path(sys.argv[1]), Path(sys.argv[2]))
