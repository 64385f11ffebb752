"""The pipe from the orchestrator to its flow, with a reader that reads, one that is stopped, and one that is gone."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from engine.run import event_stream
from engine.run.event_stream import EventReader, EventWriter


@contextmanager
def pipe():
    with EventReader() as reader:
        writer = EventWriter(reader.writer)
        yield reader, writer
        writer.close()


def test_each_event_arrives_once_in_order_and_a_half_written_one_when_it_is_whole():
    with EventReader() as reader:
        events = [("progress", ["loading", None]), ("step", {"step": 0, "loss": 0.5}), ("notice", ["rewards", "é\n"])]
        writer = EventWriter(reader.writer)
        for event in events:
            writer.send(*event)
        assert reader.read(1.0) == events
        os.write(reader.writer, b'{"failed": ["Rat')
        assert reader.read(0.0) == []
        os.write(reader.writer, b'ioGapError", "no"]}\n')
        assert reader.read(0.0) == [("failed", ["RatioGapError", "no"])]
        writer.close()
        writer.close()  # as often as one likes
        began = time.monotonic()
        assert (reader.read(0.2), reader.read(0.2)) == ([], [])  # and does not spin once the writer has gone
        assert time.monotonic() - began > 0.15


def test_a_reader_that_is_stopped_stops_nothing_and_misses_no_step():
    """It finds what a pipe holds, all steps since, and only as much progress as was allowed to wait."""
    with pipe() as (reader, writer):
        began = time.monotonic()
        for step in range(3000):
            writer.send("step", {"step": step, "text": "x" * 50})
            writer.send("progress", ["y" * 50, 0.5])
        writer.send("failed", ["DiskError", "full"])
        assert time.monotonic() - began < 5
        found = []
        while "failed" not in dict(found):
            found += reader.read(0.0)
            writer.send("progress", ["on", None])
        assert [content["step"] for kind, content in found if kind == "step"] == list(range(3000))
        assert sum(kind == "progress" for kind, _ in found) < 2500


@pytest.mark.parametrize("gone", [True, False])
def test_an_end_without_a_reader_takes_no_time_and_with_a_stopped_one_a_few_seconds(gone, monkeypatch):
    monkeypatch.setattr(event_stream, "FLUSH_S", 0.3)
    reader = EventReader()
    writer = EventWriter(reader.writer)
    if gone:
        reader.__exit__()
    for step in range(2):
        writer.send("step", {"step": step, "text": "x" * 100_000})
    began = time.monotonic()
    writer.close()
    assert (0.2 < time.monotonic() - began < 5) != gone
    if not gone:
        reader.__exit__()


def test_no_child_of_the_orchestrator_has_the_pipe():
    with pipe() as (reader, _):
        code = f"import os; os.fstat({reader.writer})"
        done = subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, text=True)
        assert "Bad file descriptor" in done.stderr
