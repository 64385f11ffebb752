"""How the training is started again."""

import itertools

from engine.config import Run
from tasks.train import pause


def test_resumes_outlast_a_storage_outage_of_ten_minutes():
    told = ("CheckpointError", "s3:// does not answer")
    assert sum(pause(told, starts) for starts in range(1, Run().resumes + 1)) > 600
    pauses = [pause(told, starts) for starts in range(8)]
    assert all(one <= other for one, other in itertools.pairwise(pauses))


def test_a_death_is_resumed_at_once():
    assert pause(("ProcessDied", "the trainer died"), 2) == 0.0
    assert pause(None, 1) == 0.0
