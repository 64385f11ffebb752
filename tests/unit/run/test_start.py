"""How a run began, in its folder: start.json."""

import pytest

from engine.errors import BadInput
from engine.run.run_start import FILE, RunStart, read_start

NIGHT = RunStart(start="nightly", continued_from="models:/nights/6")


def test_what_is_written_is_read(tmp_path):
    assert read_start(tmp_path) == RunStart()
    NIGHT.write(tmp_path)
    assert read_start(tmp_path) == NIGHT


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "Expecting property name"), ('{"start": "weekly"}', "'base', 'nightly'"), ("[]", "valid dictionary")],
)
def test_a_damaged_file_is_bad_input(tmp_path, content, said):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(BadInput, match=rf"start\.json: how the run began can't be read \(.*{said}"):
        read_start(tmp_path)
