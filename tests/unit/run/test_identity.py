"""A run's number: whose checkpoints it resumes from, and which places it does not begin in."""

import json
import time
import uuid
from datetime import timedelta

import pytest

from engine.config import Config
from engine.errors import BadInput
from engine.run.identity import began, claim, identity, known_number
from tasks.input_checks import check_run_folder


@pytest.fixture
def config(tmp_path):
    return Config(
        run={"name": "nightly", "output": str(tmp_path / "runs")}, checkpoint={"path": str(tmp_path / "place")}
    )


def checkpoint(root, step, **marker):
    folder = root / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "_SUCCESS.json").write_text(json.dumps({"step": step, "files": {}, **marker}))


def test_a_number_is_given_once(config):
    claim(config.folder, config, resume=False)
    first = identity(config.folder)
    assert len(first) == 32
    claim(config.folder, config, resume=True)
    assert identity(config.folder) == first


def test_a_number_says_when_its_run_began(config):
    """To the millisecond, whatever the time is later."""
    before = time.time()
    claim(config.folder, config, resume=False)
    number = identity(config.folder)
    assert before - 0.001 <= began(number).timestamp() <= time.time()
    assert uuid.UUID(number).version == 7
    assert began(number).utcoffset() == timedelta(0)
    assert began("") is None


def test_a_run_does_not_begin_among_the_checkpoints_of_another(config, tmp_path):
    checkpoint(tmp_path / "place/nightly", 96, run="other")
    checkpoint(tmp_path / "place/nightly", 100, run="other")
    with pytest.raises(
        BadInput, match=r"place/nightly .*checkpoints of another run: step-000096, step-000100; .*--resume"
    ):
        claim(config.folder, config, resume=False)
    assert identity(config.folder) == ""
    (tmp_path / "place/nightly/step-000100/_SUCCESS.json").unlink()
    (tmp_path / "place/nightly/step-000096/_SUCCESS.json").unlink()  # halves of uploads are nobody's
    claim(config.folder, config, resume=False)
    assert identity(config.folder) not in ("", "other")


def test_a_lost_run_folder_gets_the_number_of_the_newest_checkpoint(config, tmp_path):
    with pytest.raises(
        BadInput, match=r"is no run folder, and .*place/nightly \(checkpoint.path\) holds no complete checkpoint"
    ):
        check_run_folder(config, resume=True)
    checkpoint(tmp_path / "place/nightly", 96, run="older")
    checkpoint(tmp_path / "place/nightly", 100, run="lost")
    check_run_folder(config, resume=True)
    assert known_number(config) == "lost"
    assert identity(config.folder) == ""
    claim(config.folder, config, resume=True)
    assert identity(config.folder) == "lost"
    assert known_number(config) == "lost"


def test_checkpoints_in_the_run_folder_say_who_it_is_before_those_of_the_place(config, tmp_path):
    checkpoint(tmp_path / "place/nightly", 100, run="other")
    checkpoint(config.folder / "checkpoints", 5)  # of a version that gave no numbers
    claim(config.folder, config, resume=True)
    assert identity(config.folder) == ""
