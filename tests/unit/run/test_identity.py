"""A run's number: whose checkpoints it resumes from, and which places it does not begin in."""

import json
import time
import uuid
from datetime import timedelta

import pytest

from engine.config import Config
from engine.errors import BadInput
from engine.run.files import seal
from engine.run.identity import claim_run_id, known_number, read_run_id, run_began
from tasks.input_checks import check_run_folder


@pytest.fixture
def config(tmp_path):
    return Config(
        run={"name": "nightly", "output": str(tmp_path / "runs")}, checkpoint={"path": str(tmp_path / "place")}
    )


OLDER, LOST, OTHER = (f"019a0000000{digit}7" + "0" * 19 for digit in "123")
"""Numbers of runs."""


def checkpoint(root, step, run):
    folder = root / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "_SUCCESS.json").write_text(json.dumps(seal({"step": step, "files": {}, "run": run})))


def test_a_number_is_given_once(config):
    claim_run_id(config.folder, config, resume=False)
    first = read_run_id(config.folder)
    assert len(first) == 32
    claim_run_id(config.folder, config, resume=True)
    assert read_run_id(config.folder) == first


def test_a_number_says_when_its_run_began(config):
    """To the millisecond, whatever the time is later."""
    before = time.time()
    claim_run_id(config.folder, config, resume=False)
    number = read_run_id(config.folder)
    assert before - 0.001 <= run_began(number).timestamp() <= time.time()
    assert uuid.UUID(number).version == 7
    assert run_began(number).utcoffset() == timedelta(0)
    assert run_began("") is None


def test_a_run_does_not_begin_among_the_checkpoints_of_another(config, tmp_path):
    checkpoint(tmp_path / "place/nightly", 96, run=OTHER)
    checkpoint(tmp_path / "place/nightly", 100, run=OTHER)
    with pytest.raises(
        BadInput, match=r"place/nightly .*checkpoints of another run: step-000096, step-000100; .*--resume"
    ):
        claim_run_id(config.folder, config, resume=False)
    assert read_run_id(config.folder) == ""
    (tmp_path / "place/nightly/step-000100/_SUCCESS.json").unlink()
    (tmp_path / "place/nightly/step-000096/_SUCCESS.json").unlink()  # halves of uploads are nobody's
    claim_run_id(config.folder, config, resume=False)
    assert read_run_id(config.folder) not in ("", OTHER)


def test_a_lost_run_folder_gets_the_number_of_the_newest_checkpoint(config, tmp_path):
    with pytest.raises(
        BadInput, match=r"is not a run folder, and .*place/nightly \(checkpoint.path\) holds no complete checkpoint"
    ):
        check_run_folder(config, resume=True)
    checkpoint(tmp_path / "place/nightly", 96, run=OLDER)
    checkpoint(tmp_path / "place/nightly", 100, run=LOST)
    check_run_folder(config, resume=True)
    assert known_number(config) == LOST
    assert read_run_id(config.folder) == ""
    claim_run_id(config.folder, config, resume=True)
    assert read_run_id(config.folder) == LOST
    assert known_number(config) == LOST


def test_checkpoints_in_the_run_folder_say_who_it_is_before_those_of_the_place(config, tmp_path):
    checkpoint(tmp_path / "place/nightly", 100, run=OTHER)
    checkpoint(config.folder / "checkpoints", 5, run=LOST)
    claim_run_id(config.folder, config, resume=True)
    assert read_run_id(config.folder) == LOST


@pytest.mark.parametrize(
    "text", ["", "\n", LOST[:-1], LOST.upper(), f"{LOST}\n\n", "mine\n", "f" * 12 + LOST[12:], "0" * 32, "\0" * 33]
)
def test_a_file_without_a_number_is_refused_and_its_deletion_brings_the_number_back(config, text):
    """Also one that was edited by hand: `run_began` would fail on it."""
    checkpoint(config.folder / "checkpoints", 5, run=LOST)
    (config.folder / "run_id").write_text(text)
    with pytest.raises(BadInput, match=r"run_id: .* is not a run number .*; delete the file and resume"):
        known_number(config)
    (config.folder / "run_id").unlink()
    claim_run_id(config.folder, config, resume=True)
    assert run_began(read_run_id(config.folder)).year == 2025
