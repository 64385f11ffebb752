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
from engine.orchestrator.in_run_evaluation import cut_evaluations
from engine.run.folder import RunFolder
from support.run_folders import add_line
from tasks.tracking import evaluations, others, tracked_run

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
    """The config of a run for a tracker that is installed. Its name is the test's, because trackio keeps the folder of
    a process's first test."""

    def make(name, needed=None):
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # trackio reads it when it is imported
        pytest.importorskip(needed or name)
        return Config(
            run=Run(name=tmp_path.name, output=str(tmp_path)), tracking=Tracking(also=(name,)), train=Train(steps=5)
        )

    return make


def track(config, *steps):
    """Steps of a run, of which one was evaluated."""
    with tracked_run.track_run(config):
        for step in steps:
            row = {"step": step, "loss": step / 10, "versions_seen": [step], "staleness": {"0": 8}}
            add_line(config.folder / "steps.jsonl", **row)
        if 2 in steps:
            add_line(config.folder / "evaluations.jsonl", **EVALUATION)


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


def test_tensorboard_has_each_figure_once_also_after_a_resume_and_an_evaluation(config_of):
    config = config_of("tensorboard")
    track(config, 0, 1, 2)
    track(config, 3)
    add_line(config.folder / "evaluations.jsonl", **EVALUATION | {"step": 4, "table": "evaluations/step-4.jsonl"})
    for _ in range(2):
        evaluations.log_finished(config)
    found = scalars(config.folder / "tensorboard")
    assert found["loss"] == [(step, pytest.approx(step / 10)) for step in range(4)]
    assert found["versions_seen_max"] == [(step, step) for step in range(4)]
    assert found["staleness/0"] == [(step, 8) for step in range(4)]
    assert found["held out/avg_at_2"] == [(2, 0.5), (4, 0.5)]
    assert not {"step", "ended_s"} & found.keys()


def test_trackio_has_them_and_the_next_process_gives_a_run_of_its_own(config_of):
    config = config_of("trackio")
    track(config, 0, 1, 2)
    track(config, 3)
    from trackio.sqlite_storage import SQLiteStorage

    runs = [run["id"] for run in SQLiteStorage.get_run_records("metronome") if run["name"] == config.run.name]
    rows = [SQLiteStorage.get_logs("metronome", run_id=run) for run in runs]
    losses = sorted([(row["step"], row["loss"]) for row in one if "loss" in row] for one in rows)
    assert losses == [[(n, n / 10) for n in range(3)], [(3, 0.3)]]
    assert [row["step"] for one in rows for row in one if "held out/avg_at_2" in row] == [2]


def test_wandb_has_them_in_its_offline_mode(config_of):
    config = config_of("wandb")
    track(config, 0, 1, 2)
    (file,) = config.folder.rglob("run-*.wandb")
    rows = wandb_rows(file)
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert [(row["step"], row["held out/avg_at_2"]) for row in rows if "held out/avg_at_2" in row] == [(2, 0.5)]


def test_a_tracker_that_fails_is_reported_once_and_one_that_hangs_is_waited_for_only_so_long(
    config_of, monkeypatch, capsys
):
    config = config_of("wandb", needed="json")

    def away(config):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(others, "TRACKERS", {"wandb": away})
    track(config, 0, 1, 2)
    told = "warning: wandb (tracking.also) does not take the figures: no route"
    assert capsys.readouterr().err.count(told) == 1
    ended = threading.Event()
    hangs = (lambda step, figures: ended.wait(20.0), lambda: None)
    monkeypatch.setattr(others, "TRACKERS", {"wandb": lambda config: hangs})
    trackers = others.OtherTrackers(config)
    trackers.log(0, {"loss": 0.1})
    began = time.monotonic()
    trackers.close(0.1)
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
    code = "from engine.config import Config, Run, Tracking; from tasks.tracking.others import OtherTrackers; "
    code += f"config = Config(run=Run(name='asks', output={str(tmp_path)!r}), tracking=Tracking(also=('wandb',))); "
    code += "found = OtherTrackers(config); found.log(0, {'loss': 0.1}); found.close(60.0)"
    (tmp_path / "asks").mkdir()
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


def test_evaluations_after_a_resume_that_cuts_some_are_each_given_once(tmp_path, monkeypatch):
    """Also one of a version before those that were cut, as of another evaluate.every."""
    given = []
    tracker = (lambda step, figures: given.append((step, figures["held out/avg_at_2"])), lambda: None)
    monkeypatch.setattr(others, "TRACKERS", {"wandb": lambda config: tracker})
    config = Config(run=Run(name="cut", output=str(tmp_path)), tracking=Tracking(also=("wandb",)), train=Train(steps=9))
    figures = {0: 0.1, 10: 0.2, 20: 0.3, 30: 0.4}, {25: 0.77, 30: 0.42}
    for part in figures:
        with tracked_run.track_run(config):
            for step, value in part.items():
                more = {"step": step, "weight_version": step, "avg_at_k": value, "in_run": True}
                add_line(config.folder / "evaluations.jsonl", **{**EVALUATION, **more})
        cut_evaluations(RunFolder(config.folder), 20)
    assert given == [one for part in figures for one in part.items()]
