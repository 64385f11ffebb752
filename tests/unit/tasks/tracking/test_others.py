"""The trackers of `tracking.also` have the figures of the run folder, read back by their own packages."""

import contextlib
import json
import os
import pty
import struct
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

import pytest

from engine.config import Config, Run, Tracking, Train
from engine.errors import BadInput
from engine.run.files import append_line
from tasks.tracking import others

EVALUATION = {
    **{"step": 2, "weight_version": 2, "benchmark": "held out", "problems": 4, "samples": 2, "avg_at_k": 0.5},
    **{"pass_at_k": 0.75, "ci_low": 0.2, "ci_high": 0.8, "table": "evaluations/step-2.jsonl"},
}
HEAD = 7
BLOCK = 32768
"""Bytes of a head and of a block in wandb's file."""
ENDS = (1, 4)
"""Kinds of a part with which a record ends: it is whole, or the last one."""


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    """The config of a run with three steps and an evaluation of an earlier one, for a tracker that is installed. Its
    name is the test's, because trackio keeps the folder of a process's first test."""

    def make(name, needed=None):
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # trackio reads it when it is imported
        pytest.importorskip(needed or name)
        config = Config(
            run=Run(name=tmp_path.name, output=str(tmp_path)), tracking=Tracking(also=(name,)), train=Train(steps=5)
        )
        config.folder.mkdir()
        for step in range(3):
            add_step(config, step)
        append_line(config.folder / "evaluations.jsonl", EVALUATION)
        return config

    return make


def add_step(config, step):
    append_line(
        config.folder / "steps.jsonl", {"step": step, "loss": step / 10, "versions_seen": [step], "staleness": {"0": 8}}
    )


def scalars(folder):
    """{tag: [(step, value), ...]} of all event files, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    read = EventAccumulator(str(folder))
    read.Reload()
    return {
        tag: [(event.step, float(tensor_util.make_ndarray(event.tensor_proto))) for event in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    }


def wandb_rows(file):
    """The rows of history in wandb's offline file, whose last record its process may write a moment after the run has
    ended."""
    deadline = time.monotonic() + 30.0
    while (records := wandb_records(file.read_bytes()))[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, f"{file} has {len(records)} records after 30 s, no exit"
        time.sleep(0.1)
    rows = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in rows]


def wandb_records(data):
    """The whole records of a file: after a head of seven bytes, records in the format of LevelDB's log, in blocks of
    32 KiB. A record that does not fit into a block is in several parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = [Record()]
    parts = b""
    place = HEAD
    while place + HEAD <= len(data):
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if kind == 0 or BLOCK - place % BLOCK < HEAD:  # the rest of the block is empty
            place += BLOCK - place % BLOCK
            continue
        if place + HEAD + length > len(data):  # not yet written
            break
        parts += data[place + HEAD : place + HEAD + length]
        place += HEAD + length
        if kind in ENDS:
            records.append(Record.FromString(parts))
            parts = b""
    return records


def trackio_rows(config):
    """(step, loss) of each row with a loss, in the order in which trackio has them."""
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(config.tracking.experiment, config.run.name)
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def test_tensorboard_has_each_figure_once_also_after_a_resume(config_of):
    config = config_of("tensorboard")
    others.push_once(config)
    add_step(config, 3)
    thread = others.OtherTrackersThread(config)
    thread.close(60.0)
    others.push_once(config)
    found = scalars(config.folder / "tensorboard")
    assert found["loss"] == [(step, pytest.approx(step / 10)) for step in range(4)]
    assert found["versions_seen_max"] == [(step, step) for step in range(4)]
    assert found["staleness/0"] == [(step, 8) for step in range(4)]
    assert found["held out/avg_at_k"] == [(2, 0.5)]
    assert "step" not in found


def test_trackio_has_them(config_of):
    config = config_of("trackio")
    others.push_once(config)
    add_step(config, 3)
    others.push_once(config)
    from trackio.sqlite_storage import SQLiteStorage

    assert trackio_rows(config) == [(n, n / 10) for n in range(4)]
    rows = SQLiteStorage.get_logs("metronome", config.run.name)
    assert [(row["step"], row["held out/avg_at_k"]) for row in rows if "held out/avg_at_k" in row] == [(2, 0.5)]


def test_rows_that_trackio_could_not_write_are_given_again(config_of, capsys):
    """It drops them with a warning; what came after them would be all that it has."""
    config = config_of("trackio")
    others.push_once(config)
    from trackio.sqlite_storage import SQLiteStorage

    lock = SQLiteStorage._get_process_lock("metronome").lockfile_path
    lock.unlink()
    lock.mkdir()  # no file can be opened there: a write fails
    add_step(config, 3)
    trackers = others.OtherTrackers(config)
    with pytest.warns(UserWarning, match="trackio failed to flush"):
        trackers.push()
    assert "warning: trackio (tracking.also) does not take the figures: it could not" in capsys.readouterr().err
    lock.rmdir()
    add_step(config, 4)
    trackers.push()
    trackers.close()
    assert trackio_rows(config) == [(n, n / 10) for n in range(3)]
    others.push_once(config)
    assert trackio_rows(config) == [(n, n / 10) for n in range(5)]


def test_a_run_of_the_same_name_is_another_run_of_trackio(config_of, tmp_path):
    config = config_of("trackio")
    others.push_once(config)
    again = config.model_copy(update={"run": Run(name=config.run.name, output=str(tmp_path / "elsewhere"))})
    again.folder.mkdir(parents=True)
    add_step(again, 7)
    others.push_once(again)
    from trackio.sqlite_storage import SQLiteStorage

    runs = [run["id"] for run in SQLiteStorage.get_run_records("metronome") if run["name"] == config.run.name]
    found = [[row["step"] for row in SQLiteStorage.get_logs("metronome", run_id=run)] for run in runs]
    assert sorted(found) == [[0, 1, 2, 2], [7]]


def test_wandb_has_them_in_its_offline_mode(config_of):
    config = config_of("wandb")
    others.push_once(config)
    (file,) = config.folder.rglob("run-*.wandb")
    rows = wandb_rows(file)
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert [(row["step"], row["held out/avg_at_k"]) for row in rows if "held out/avg_at_k" in row] == [(2, 0.5)]


def test_a_tracker_that_fails_is_reported_once_and_stops_nothing(config_of, monkeypatch, capsys):
    config = config_of("wandb", needed="json")

    def away(config):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(others, "TRACKERS", {"wandb": away})
    trackers = others.OtherTrackers(config)
    trackers.push()
    trackers.push()
    assert capsys.readouterr().err.count("warning: wandb (tracking.also) does not take the figures: no route") == 1
    assert not (config.folder / others.STATE).exists()


def test_an_evaluation_waits_for_a_tracker_that_hangs_only_so_long(config_of, monkeypatch, capsys):
    config = config_of("wandb", needed="json")
    ended = threading.Event()
    monkeypatch.setattr(others, "TRACKERS", {"wandb": lambda config: ended.wait(20.0)})
    monkeypatch.setattr(others, "CLOSE_S", 0.1)
    began = time.monotonic()
    others.push_once(config)
    ended.set()
    assert time.monotonic() - began < 10
    assert "tracking.also did not end within 0.1 s" in capsys.readouterr().err


def printed(leader):
    """What was printed at a terminal, which gives at most 4 kB at a time."""
    os.set_blocking(leader, False)
    said = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(leader, 2**16):
            said += part
    return said.decode()


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_without_a_log_in_asks_nobody_at_the_terminal(tmp_path):
    """It would take what is typed there, and wait for it."""
    code = "from engine.config import Config, Run, Tracking; from tasks.tracking.others import push_once; "
    code += f"push_once(Config(run=Run(name='asks', output={str(tmp_path)!r}), tracking=Tracking(also=('wandb',))))"
    folder = tmp_path / "asks"
    folder.mkdir()
    append_line(folder / "steps.jsonl", {"step": 0, "loss": 0.1})
    names = ("WANDB_API_KEY", "WANDB_MODE")
    environment = {name: value for name, value in os.environ.items() if name not in names} | {"HOME": str(tmp_path)}
    leader, terminal = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=terminal, stdout=terminal, stderr=terminal, env=environment, timeout=120
    )
    said = printed(leader)
    os.close(leader)
    os.close(terminal)
    assert done.returncode == 0
    assert "wandb login" in said
    assert "Enter your choice" not in said


def test_a_package_that_is_missing_is_bad_input(monkeypatch):
    monkeypatch.setattr(others.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"tracking.also: trackio is not installed; install it: pip install 'metronome"):
        others.check_others(Config(tracking=Tracking(also=("trackio",))))
