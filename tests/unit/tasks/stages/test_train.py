"""How the training is started again."""

import itertools
from types import SimpleNamespace

import pytest

from engine import errors
from engine.config import Run
from tasks.stages.train import _worth_resuming, pause_before_resume


def test_resumes_outlast_a_storage_outage_of_ten_minutes():
    told = ("CheckpointError", "s3:// does not answer")
    assert sum(pause_before_resume(told, starts) for starts in range(1, Run().resumes + 1)) > 600
    pauses = [pause_before_resume(told, starts) for starts in range(8)]
    assert all(one <= other for one, other in itertools.pairwise(pauses))


def test_a_death_is_resumed_at_once():
    assert pause_before_resume(("ProcessDied", "the trainer died"), 2) == 0.0
    assert pause_before_resume(None, 1) == 0.0


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("ProcessDied", True),
        ("DeadlineError", True),  # of an orchestrator that was stopped or hangs, too
        ("CheckpointError", True),
        ("WeightSyncError", True),  # a bit that flipped on the way to the instances does not flip again
        ("RewardError", False),
        ("StaleRolloutError", False),
        ("DiskError", False),
        ("BadInput", False),
    ],
)
def test_what_need_not_happen_again_is_resumed(name, again):
    error = vars(errors)[name]("why")
    state = SimpleNamespace(result=lambda raise_on_failure: error)
    assert _worth_resuming(None, None, state) == again
