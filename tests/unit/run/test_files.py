"""Lines of a run folder, on a disk that is full."""

import resource

import pytest

from engine.run.files import append_line, read_lines


def test_a_line_that_does_not_fit_on_the_disk_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_line(path, {"step": 0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # as a full disk: a part of the line is written, then no more
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            append_line(path, {"step": 1, "text": "x" * 500})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append_line(path, {"step": 2})
    assert list(read_lines(path)) == [{"step": 0}, {"step": 2}]
