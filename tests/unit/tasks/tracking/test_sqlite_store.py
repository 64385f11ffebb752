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

from engine.config import Config, Run
from support.disk_order import disk_order
from support.runs import ROOT
from support.stores import first_tables, half_migrated
from tasks.tracking import retry, sqlite_store, tracked_run

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


@pytest.mark.parametrize(
    "leave", [lambda file: file.touch(), first_tables, half_migrated], ids=["empty", "first", "half"]
)
def test_a_store_that_was_made_halfway_is_made_anew(tmp_path, monkeypatch, leave):
    leave(tmp_path / "mlflow.db")
    half = (tmp_path / "mlflow.db").read_bytes()
    noted = disk_order(monkeypatch)
    experiment = connected(tmp_path)
    assert mlflow.MlflowClient().get_experiment(experiment).name == Config().tracking.experiment
    [aside] = tmp_path.glob("mlflow.db.half-made-*")
    assert aside.read_bytes() == half
    assert noted[:3] == [f"name {aside.name}", "name mlflow.db", f"sync {tmp_path.name}"]


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
    connected(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        assert store.execute("SELECT COUNT(*) FROM runs").fetchone() == (0,)
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert not list(tmp_path.glob(".mlflow.db.partial*"))


def test_a_file_that_sqlite_can_not_read_is_left_to_mlflow(tmp_path):
    file = tmp_path / "mlflow.db"
    file.write_bytes(b"no database" * 1000)
    sqlite_store.whole_store(f"sqlite:///{file}")
    assert file.read_bytes() == b"no database" * 1000


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


@pytest.mark.slow
def test_a_store_that_another_process_locks_is_waited_for(tmp_path):
    """As by a backup. MLflow itself gives up after about ten seconds."""
    connected(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as backup:
        backup.execute("BEGIN EXCLUSIVE")
        first = subprocess.Popen([sys.executable, "-c", CONNECT, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
        try:
            assert first.stdout.readline() == b"begins\n"
            time.sleep(15)
            backup.rollback()
            assert first.wait(60) == 0
        finally:
            first.kill()
            first.stdout.close()


def test_a_database_that_stays_locked_is_an_mlflow_that_does_not_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(retry, "RETRY_S", (0.01,))
    monkeypatch.setattr(retry, "AWAY_S", 0.1)
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/locked.db", connect_args={"timeout": 0.01})
    with contextlib.closing(sqlite3.connect(tmp_path / "locked.db")) as backup:
        backup.execute("BEGIN EXCLUSIVE")
        with pytest.raises(retry.TrackingAway, match="opening: MLflow did not answer.*database is locked"):
            retry.retry_while_away("opening", lambda: sqlalchemy.inspect(engine).get_table_names())
    assert "opening: MLflow does not answer: (sqlite3.OperationalError) database is locked" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_whenever_the_first_call_is_killed_the_next_one_works(tmp_path):
    chance = random.Random(0)
    for number in range(10):
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


def test_a_new_store_is_made_in_silence(tmp_path):
    """`make services` prints addresses, and no migrations of a database."""
    made = "import sys; from tasks.tracking.sqlite_store import whole_store; whole_store(sys.argv[1])"
    command = [sys.executable, "-c", made, f"sqlite:///{tmp_path}/mlflow.db"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "mlflow.db").stat().st_size > 0
