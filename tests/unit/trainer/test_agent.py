from types import SimpleNamespace

import pytest

from engine.trainer.agent import _first_failure


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({0: (1, 100), 1: (-9, 101)}, 1),  # rank 0 lost its connection
        ({0: (-15, 100), 1: (-9, 101)}, 1),  # and the agent ended it before it was through with its error
        ({0: (1, 101), 1: (1, 100)}, 1),
        ({0: (-15, 100), 1: (-15, 101)}, 0),
    ],
)
def test_the_rank_that_a_signal_ended_is_named_and_not_one_that_the_agent_ended(failures, first):
    found = {rank: SimpleNamespace(exitcode=code, timestamp=when) for rank, (code, when) in failures.items()}
    assert _first_failure(SimpleNamespace(failures=found))[0] == first
