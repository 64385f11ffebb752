"""MLflow's sqlite stores that a kill left half made."""

import contextlib
import sqlite3

import sqlalchemy
from mlflow.store.tracking.dbmodels.initial_models import Base


def first_tables(file):
    Base.metadata.create_all(sqlalchemy.create_engine(f"sqlite:///{file}"))


def half_migrated(file):
    first_tables(file)
    with contextlib.closing(sqlite3.connect(file)) as store:
        store.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        store.execute("INSERT INTO alembic_version VALUES ('451aebb31d03')")
        store.commit()
