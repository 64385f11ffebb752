import math

import pytest
import torch  # noqa: F401  (the trainer's modules need it)

from engine.config import Train
from engine.errors import StaleRolloutError
from engine.trainer.modes import Schedule, staleness
from engine.trainer.tally import Tally
from engine.types import Group, Prompt, Response, Score


def group(step, *versions, rewards=(1.0,), statuses=("ok",)):
    runs = tuple(enumerate(versions))
    responses = tuple(Response((1, 2), (-1.0, -1.0), runs, (True, True), "length", "", 0, "instance-3") for _ in rewards)
    scores = tuple(Score(r, s) for r, s in zip(rewards, statuses, strict=True))
    return Group(step, 0, Prompt("p7", "", "", (1, 2, 3)), responses, scores)


def schedule(mode, **train):
    return Schedule.of(Train(mode=mode, **train))


@pytest.mark.parametrize("mode", ["sync", "periodic"])
def test_only_the_steps_own_version_is_on_policy(mode):
    assert list(schedule(mode).accepted(5)) == [5]
    schedule(mode).check(group(5, 5))
    for wrong in ((4,), (6,), (5, 4)):
        with pytest.raises(StaleRolloutError, match=r"step 5, prompt p7, response 0 of instance-3.*accepts only 5"):
            schedule(mode).check(group(5, *wrong))


@pytest.mark.parametrize(("mode", "train", "ahead"), [
    ("sync", {}, 0), ("periodic", {}, 0), ("one_step_off", {}, 1), ("bounded", {"max_staleness": 3}, 3),
    ("bounded", {"max_staleness": 2, "exact_lag": True}, 2),
])  # fmt: skip
def test_every_batch_is_started_once_and_no_earlier_than_its_staleness_allows(mode, train, ahead):
    for start in (0, 3):
        started = {}
        for step in range(start, 8):
            for batch in schedule(mode, **train).due(step, start, 8):
                assert batch not in started
                started[batch] = step
        assert sorted(started) == list(range(start, 8))
        for batch, step in started.items():
            assert step == max(start, batch - ahead)  # sampled from version `step`
            assert step in schedule(mode, **train).accepted(batch)


def test_what_is_staler_than_the_bound_is_refused():
    bounded = schedule("bounded", max_staleness=2)
    for version in (3, 4, 5):
        bounded.check(group(5, version))
    with pytest.raises(StaleRolloutError, match="version 2.*'bounded' accepts only 3 to 5"):
        bounded.check(group(5, 2))
    assert list(bounded.accepted(1)) == [0, 1]


def test_staleness_is_that_of_the_oldest_token():
    assert [staleness(5, response) for response in group(5, 3, 5).responses] == [2]
    assert staleness(5, Response((), (), (), (), "stop", "", 0, "i")) == 0


def test_a_response_that_was_continued_is_as_stale_as_its_oldest_token_and_every_token_is_checked():
    assert not Schedule.of(Train(mode="one_step_off"), partial=True).exact  # weights do not wait for it
    bounded = schedule("bounded", max_staleness=2)
    bounded.check(group(5, 3, 4, 5))
    with pytest.raises(StaleRolloutError, match="version 2"):
        bounded.check(group(5, 2, 5))
    tally = Tally()
    tally.add_group(group(5, 3, 5, rewards=(1.0, 0.0), statuses=("ok", "ok")), 4, True)
    tally.add_group(group(5, 5), 2, True)
    figures = Tally.merged([tally.wire(leader=True, peak_bytes=1)], 3)
    assert (figures["continued"], figures["versions_seen"]) == (2, [3, 5])


def test_figures():
    tally = Tally()
    tally.add_wait(0.5)
    tally.add_group(group(0, 0, rewards=(1.0, 0.0), statuses=("ok", "timeout")), 4, True)
    tally.add_wait(0.25)
    tally.loss, tally.mismatch_kl, tally.scored_tokens = 3.0, 4.0, 8
    figures = Tally.merged([tally.wire(leader=True, peak_bytes=2**30)], denominator=2)
    assert figures["reward_mean"] == 0.5
    assert figures["reward_std"] == 0.5
    assert figures["trained_tokens"] == 2 * (3 + 2)
    assert figures["truncated"] == 2
    assert figures["reward_timeouts"] == 1
    assert (figures["wait_first_s"], figures["wait_s"]) == (0.5, 0.75)
    assert figures["loss"] == 1.5
    assert figures["mismatch_kl"] == 0.5
    assert figures["versions_seen"] == [0]
    assert figures["memory_peak_gib"] == [1.0]


def test_figures_of_several_ranks_are_sums_over_responses_and_mean_times_of_the_leaders():
    first, second, follower = Tally(), Tally(), Tally()
    first.add_group(group(0, 0, rewards=(1.0, 0.0), statuses=("ok", "ok")), 4, True)
    second.add_group(group(0, 0, rewards=(1.0, 1.0), statuses=("ok", "error")), 4, False)
    first.loss, follower.loss, follower.computed_tokens = 1.0, 3.0, 7
    first.train_s, second.train_s, follower.train_s = 1.0, 3.0, 50.0
    second.worst_gap(0.5)
    figures = Tally.merged([first.wire(True, 1), second.wire(True, 1), follower.wire(False, 1)], 4)
    assert (figures["reward_mean"], figures["reward_errors"], figures["loss"]) == (0.75, 1, 1.0)
    assert figures["equal_groups"] == 1
    assert (figures["train_s"], figures["computed_tokens"], figures["max_ratio_gap"]) == (2.0, 7, 0.5)
    follower.worst_gap(math.nan)
    assert math.isnan(Tally.merged([first.wire(True, 1), follower.wire(False, 1)], 4)["max_ratio_gap"])


def test_nan_gaps_are_not_hidden_by_later_ones():
    tally = Tally()
    tally.worst_gap(0.1)
    tally.worst_gap(math.nan)
    assert math.isnan(tally.max_ratio_gap)
    tally.worst_gap(0.2)
    assert math.isnan(tally.max_ratio_gap)
