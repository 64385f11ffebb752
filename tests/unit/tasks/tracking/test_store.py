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

from support.runs import ROOT
from tasks.tracking import store

CREATE = """
import sys
from tasks.tracking import store
print("begins", flush=True)
store.whole_store(f"sqlite:///{sys.argv[1]}/mlflow.db")
"""


def create(folder):
    """An experiment in a new store."""
    client = mlflow.MlflowClient(store.whole_store(f"sqlite:///{folder}/mlflow.db"))
    return client.create_experiment("works")


def killed_halfway(file):
    """A file and the journal of a change that was under way when its process was killed."""
    journal = file.with_name(f"{file.name}-journal")
    with contextlib.closing(sqlite3.connect(file)) as store:
        store.execute("CREATE TABLE runs (name TEXT)")
        store.executemany("INSERT INTO runs VALUES (?)", [("x" * 500,)] * 1000)
        store.commit()
        store.execute("PRAGMA cache_size = 1")
        store.execute("UPDATE runs SET name = 'changed'")
        left = file.read_bytes(), journal.read_bytes()
    file.write_bytes(left[0])
    journal.write_bytes(left[1])


def test_what_a_kill_has_left_of_a_store_does_not_come_into_the_next_one(tmp_path):
    killed_halfway(tmp_path / ".mlflow.db.partial")
    create(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        assert store.execute("SELECT COUNT(*) FROM runs").fetchone() == (0,)
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert not list(tmp_path.glob(".mlflow.db.partial*"))


def test_a_database_that_stays_locked_is_an_mlflow_that_does_not_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(store, "RETRY_S", (0.01,))
    monkeypatch.setattr(store, "AWAY_S", 0.1)
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/locked.db", connect_args={"timeout": 0.01})
    with contextlib.closing(sqlite3.connect(tmp_path / "locked.db")) as backup:
        backup.execute("BEGIN EXCLUSIVE")
        with pytest.raises(store.TrackingAway, match="opening: MLflow did not answer.*database is locked"):
            store.retry_while_away("opening", lambda: sqlalchemy.inspect(engine).get_table_names())
    assert "opening: MLflow does not answer: (sqlite3.OperationalError) database is locked" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_whenever_the_first_call_is_killed_the_next_one_works(tmp_path):
    chance = random.Random(0)
    for number in range(10):
        folder = tmp_path / str(number)
        first = subprocess.Popen(
            [sys.executable, "-c", CREATE, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert first.stdout.readline() == "begins\n"
        time.sleep(chance.uniform(0.1, 4.0))
        first.send_signal(signal.SIGKILL)
        first.wait(30)
        first.stdout.close()
        assert create(folder)


def test_a_new_store_is_made_in_silence(tmp_path):
    """`make services` prints addresses, and no migrations of a database."""
    command = [sys.executable, "-c", CREATE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("begins\n", "")
    assert (tmp_path / "mlflow.db").stat().st_size > 0
