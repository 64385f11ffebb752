"""The sqlite store of tracking, when the command that makes it is killed."""

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import time

import mlflow
import pytest
import sqlalchemy
from mlflow.store.tracking.dbmodels.initial_models import Base

from engine.config import Config, Run
from support.runs import ROOT
from tasks.tracking import sqlite_store, tracked_run

CONNECT = """
import sys
from engine.config import Config, Run
from tasks.tracking import tracked_run
print("begins", flush=True)
tracked_run._connect(Config(run=Run(output=sys.argv[1])))
"""


def connected(output):
    sqlite_store._whole.clear()
    return tracked_run._connect(Config(run=Run(output=str(output))))


def first_tables(file):
    Base.metadata.create_all(sqlalchemy.create_engine(f"sqlite:///{file}"))


def half_migrated(file):
    first_tables(file)
    with contextlib.closing(sqlite3.connect(file)) as store:
        store.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        store.execute("INSERT INTO alembic_version VALUES ('451aebb31d03')")
        store.commit()


@pytest.mark.parametrize(
    "leave", [lambda file: file.touch(), first_tables, half_migrated], ids=["empty", "first", "half"]
)
def test_a_store_that_was_made_halfway_is_made_anew(tmp_path, leave):
    leave(tmp_path / "mlflow.db")
    experiment = connected(tmp_path)
    assert mlflow.MlflowClient().get_experiment(experiment).name == Config().tracking.experiment


def test_a_store_with_runs_is_never_replaced(tmp_path):
    experiment = connected(tmp_path)
    run = mlflow.MlflowClient().create_run(experiment)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        store.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")
        store.commit()
    before = (tmp_path / "mlflow.db").read_bytes()
    sqlite_store._whole.clear()
    sqlite_store.whole_store(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert (tmp_path / "mlflow.db").read_bytes() == before
    assert run.info.run_id.encode() in before


@pytest.mark.timeout(900)
@pytest.mark.parametrize("moments", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_whenever_the_first_call_is_killed_the_next_one_works(tmp_path, moments):
    chance = random.Random(0)
    for number in range(moments):
        folder = tmp_path / str(number)
        first = subprocess.Popen(
            [sys.executable, "-c", CONNECT, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert first.stdout.readline() == "begins\n"
        time.sleep(chance.uniform(0.1, 4.0))
        first.send_signal(signal.SIGKILL)
        first.wait(30)
        first.stdout.close()
        connected(folder)
