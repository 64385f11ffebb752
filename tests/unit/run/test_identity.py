"""A run's number: whose checkpoints it resumes from, and which places it does not begin in."""

import json
import time

import pytest

from engine.config import Config
from engine.errors import BadInput
from engine.run.files import seal
from engine.run.identity import claim_run, known_run
from engine.run.run_file import FILE, read_run
from tasks.stages.input_checks import check_run_folder


@pytest.fixture
def config(tmp_path):
    return Config(
        run={"name": "nightly", "output": str(tmp_path / "runs")}, checkpoint={"path": str(tmp_path / "place")}
    )


OLDER, LOST, OTHER = "123"
"""Ids of runs."""


def checkpoint(root, step, run):
    folder = root / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "_SUCCESS.json").write_text(json.dumps(seal({"step": step, "files": {}, "run": run, "began": 1.5})))


def test_a_run_has_one_number_and_the_time_of_its_beginning(config, tmp_path):
    before = time.time()
    claim_run(config, resume=False)
    first = read_run(config.folder)
    assert len(first.id) == 32
    assert before <= first.began_at.timestamp() <= time.time()
    claim_run(config, resume=True)
    assert read_run(config.folder) == first
    checkpoint(tmp_path / "place/nightly", 96, run=LOST)
    (config.folder / FILE).unlink()
    claim_run(config, resume=True)
    assert (read_run(config.folder).id, read_run(config.folder).began) == (LOST, 1.5)


def test_a_run_does_not_begin_among_the_checkpoints_of_another(config, tmp_path):
    checkpoint(tmp_path / "place/nightly", 96, run=OTHER)
    checkpoint(tmp_path / "place/nightly", 100, run=OTHER)
    with pytest.raises(
        BadInput, match=r"place/nightly .*checkpoints of another run: step-000096, step-000100; .*--resume"
    ):
        claim_run(config, resume=False)
    assert read_run(config.folder).id == ""
    (tmp_path / "place/nightly/step-000100/_SUCCESS.json").unlink()
    (tmp_path / "place/nightly/step-000096/_SUCCESS.json").unlink()  # halves of uploads are nobody's
    claim_run(config, resume=False)
    assert read_run(config.folder).id not in ("", OTHER)


def test_a_lost_run_folder_gets_the_number_of_the_newest_checkpoint(config, tmp_path):
    with pytest.raises(
        BadInput, match=r"is not a run folder, and .*place/nightly \(checkpoint.path\) holds no complete checkpoint"
    ):
        check_run_folder(config, resume=True)
    checkpoint(tmp_path / "place/nightly", 96, run=OLDER)
    checkpoint(tmp_path / "place/nightly", 100, run=LOST)
    check_run_folder(config, resume=True)
    assert known_run(config).id == LOST
    assert read_run(config.folder).id == ""
    claim_run(config, resume=True)
    assert read_run(config.folder).id == LOST
    assert known_run(config).id == LOST


def test_checkpoints_in_the_run_folder_say_who_it_is_before_those_of_the_place(config, tmp_path):
    checkpoint(tmp_path / "place/nightly", 100, run=OTHER)
    checkpoint(config.folder / "checkpoints", 5, run=LOST)
    claim_run(config, resume=True)
    assert read_run(config.folder).id == LOST
