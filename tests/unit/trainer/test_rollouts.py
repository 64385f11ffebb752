"""Where the loop's groups come from."""

from types import SimpleNamespace

import pytest

from engine.client.ranks import OneRank
from engine.errors import DeadlineError
from engine.trainer.rollouts import LiveRollouts
from engine.wire.messages import StillWaiting
from support.runs import config_of


def test_groups_that_no_program_puts_are_missed_by_name():
    config = config_of({"data.pushed": True, "train.timeout_s": 0.05})
    nobody = SimpleNamespace(ask=lambda request: StillWaiting())
    rollouts = LiveRollouts(control=nobody, ranks=OneRank(), publisher=None, config=config)
    with pytest.raises(DeadlineError, match=r"no program has put a group of step 3 in 0.05 s \(train.timeout_s\)"):
        next(rollouts.work(3))
