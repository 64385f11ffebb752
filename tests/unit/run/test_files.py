"""How state files and lines get to the disk, and on a disk that is full."""

import resource
import subprocess
import sys
from contextlib import contextmanager

import pytest

from engine.errors import MetronomeError
from engine.run.files import append_line, read_lines, write_atomically, write_json
from engine.run.trace import Trace, read_spans
from support.disk_order import disk_order
from support.runs import ROOT


def test_a_state_file_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_next_one(tmp_path, monkeypatch):
    noted = disk_order(monkeypatch)
    write_atomically(tmp_path / "state.json", "{}")
    partial, *rest = noted
    assert partial.startswith("sync .state.json.")
    assert rest == ["name state.json", f"sync {tmp_path.name}"]


def test_a_line_is_on_the_disk_when_it_is_appended(tmp_path, monkeypatch):
    noted = disk_order(monkeypatch)
    append_line(tmp_path / "lines.jsonl", {"step": 0})
    assert noted == ["sync lines.jsonl"]


@contextmanager
def full_after(size):
    """As a disk that gets full: files grow up to this size in bytes, and the body fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_line_that_does_not_fit_on_the_disk_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_line(path, {"step": 0})
    with full_after(100):
        append_line(path, {"step": 1, "text": "x" * 500})
    assert path.read_text() == '{"step": 0}\n'
    append_line(path, {"step": 2})
    assert list(read_lines(path)) == [{"step": 0}, {"step": 2}]


def test_a_trace_whose_disk_was_full_for_a_while_can_be_read_to_its_end(tmp_path):
    trace = Trace(tmp_path, "orchestrator")
    trace.add_span("first", 0.0, 1.0)
    trace.flush()
    trace.add_span("x" * 500, 1.0, 2.0)
    with full_after(200):
        trace.flush()
    trace.add_span("last", 2.0, 3.0)
    trace.flush()
    assert [span["name"] for span in read_spans(tmp_path)] == ["first", "x" * 500, "last"]


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 50_000])
def test_a_torn_line_of_any_length_is_removed_and_the_whole_lines_stay(tmp_path, length):
    path = tmp_path / "lines.jsonl"
    rows = [{"step": step, "text": "x" * 100} for step in range(3)]
    for row in rows:
        append_line(path, row)
    with path.open("a") as file:
        file.write("{" * length)
    append_line(path, {"step": 3})
    assert list(read_lines(path)) == [*rows, {"step": 3}]


def test_a_number_that_json_has_no_word_for_is_refused_by_name_and_nothing_is_written(tmp_path):
    row = {"step": 3, "grad_norm": float("inf"), "kl": float("nan"), "loss": 0.5}
    for write in (append_line, write_json):
        with pytest.raises(MetronomeError, match=r"file\.jsonl: grad_norm = inf, kl = nan is not finite"):
            write(tmp_path / "file.jsonl", row)
    with pytest.raises(MetronomeError, match="a number in it is not finite"):
        write_json(tmp_path / "file.jsonl", [row])
    assert not list(tmp_path.iterdir())


WRITER = """
import sys
from pathlib import Path
from engine.run.files import append_lines
for number in range(2000):
    append_lines(Path(sys.argv[1]), [f'{{"who": "{sys.argv[2]}", "number": {number}}}'])
"""


def test_two_processes_lose_no_line_of_each_other(tmp_path):
    """As the orchestrator and a rank append to the notices."""
    path = tmp_path / "lines.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), who], cwd=ROOT) for who in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    rows = list(read_lines(path))
    assert [[row["number"] for row in rows if row["who"] == who] for who in "ab"] == [list(range(2000))] * 2
