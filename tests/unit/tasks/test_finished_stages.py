"""What a resumed run does not do again, and when it is not resumed any more."""

import json

import pytest

from engine.errors import MetronomeError
from engine.run.files import seal
from engine.run.folder import RunFolder
from engine.run.progress import Progress
from engine.run.progress import read_progress as read_text
from tasks.attempt import Stages, count_attempt, read_progress


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def checkpoint(folder, step):
    there = folder.checkpoints / f"step-{step:06d}"
    there.mkdir(parents=True)
    (there / "_SUCCESS.json").write_text(json.dumps(seal({"step": step, "files": {}})))


def test_a_stage_is_done_once_and_its_result_is_kept(folder):
    calls = []
    assert Stages(folder).once("evaluate", lambda: calls.append(1) or {"accuracy": 0.5}) == {"accuracy": 0.5}
    # as a process started later reads it
    assert Stages(folder).once("evaluate", lambda: calls.append(2)) == {"accuracy": 0.5}
    assert calls == [1]


def test_a_stage_that_fails_is_not_done(folder):
    with pytest.raises(ZeroDivisionError):
        Stages(folder).once("evaluate", lambda: 1 // 0)
    assert Stages(folder).once("evaluate", lambda: None) is None
    assert Stages(folder).once("evaluate", lambda: 1) is None  # None is a result, too


def test_attempts_that_get_no_further_are_bounded(folder):
    count_attempt(folder, "flow", 2, "", by_hand=True)
    for _ in range(2):
        count_attempt(folder, "flow", 2, "killed")
    with pytest.raises(
        MetronomeError, match=r"was started 3 times from the same point \(0 stages done, no checkpoint\).*killed"
    ):
        count_attempt(folder, "flow", 2, "killed")
    count_attempt(folder, "training", 2, "")  # counts for itself
    count_attempt(folder, "flow", 2, "", by_hand=True)  # a person may always try again
    count_attempt(folder, "flow", 2, "killed")


def test_progress_begins_a_new_count(folder):
    for step in range(1, 9):  # more often than allowed in a row
        count_attempt(folder, "flow", 0, "killed")
        checkpoint(folder, step)
        assert read_progress(folder) == (0, step)
    Stages(folder).once("train", lambda: 8)
    count_attempt(folder, "flow", 0, "killed")
    with pytest.raises(MetronomeError, match=r"1 stage done, checkpoint after 8 steps.*run\.resumes = 0"):
        count_attempt(folder, "flow", 0, "killed")


def test_who_looks_at_the_folder_sees_the_stage_that_runs(folder):
    folder.logs.mkdir()
    stages = Stages(folder)
    with stages.shown("convert"):
        assert read_text(folder.progress) == Progress("convert")
    assert read_text(folder.progress) is None
    folder.logs.rmdir()
    with stages.shown("convert"):  # a folder that can't be written fails nothing
        pass
    folder.progress.mkdir(parents=True)  # nor does one whose file can't be deleted
    with pytest.raises(ValueError, match="of the stage"), stages.shown("convert"):
        raise ValueError("of the stage")
    with stages.shown("convert"):
        pass
