"""How a run began, in its folder: start.json, or the config.toml of the last release."""

import pytest

from engine.config.recipe import load
from engine.errors import BadInput
from engine.run.folder import RunFolder
from engine.run.start import FILE, RunStart, read_start
from support.last_release import write_old_config

NIGHT = RunStart(start="nightly", continued_from="models:/nights/6")


@pytest.fixture
def config(tmp_path):
    return load(None, [f"run.output={tmp_path}", "run.name=night", "rollout.group_size=4"])


def test_what_is_written_is_read(tmp_path):
    assert read_start(tmp_path) == RunStart()
    NIGHT.write(tmp_path)
    assert read_start(tmp_path) == NIGHT


def test_a_resume_keeps_what_the_last_release_had_in_the_config(config):
    folder = RunFolder(config.folder)
    write_old_config(config, folder.config, **NIGHT.model_dump(include={"start", "continued_from"}))
    assert load(folder.config) == config
    assert read_start(folder.path) == NIGHT
    for _ in range(2):  # by whatever resumes it
        folder.create(config, resume=True)
        assert read_start(folder.path) == NIGHT
        assert load(folder.config) == config
    assert "continued_from" not in folder.config.read_text()


def test_a_resume_is_still_checked_against_the_config_of_the_last_release(config):
    folder = RunFolder(config.folder)
    write_old_config(config, folder.config)
    with pytest.raises(BadInput, match=r"rollout\.group_size is 8, but the run has 4"):
        folder.create(load(folder.config, ["rollout.group_size=8"]), resume=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "Expecting property name"), ('{"start": "weekly"}', "'base', 'nightly'"), ("[]", "valid dictionary")],
)
def test_a_damaged_file_is_bad_input(tmp_path, content, said):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(BadInput, match=rf"start\.json: how the run began can't be read \(.*{said}"):
        read_start(tmp_path)
