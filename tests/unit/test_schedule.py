import pytest

from engine.config import Train
from engine.errors import StaleRolloutError
from engine.schedule import Schedule, response_staleness
from engine.types import Response
from support.groups import group


def schedule(mode, **train):
    return Schedule.of(Train(mode=mode, **train))


@pytest.mark.parametrize("mode", ["sync", "periodic"])
def test_only_the_steps_own_version_is_on_policy(mode):
    assert list(schedule(mode).accepted(5)) == [5]
    schedule(mode).check_versions(group(5, 5))
    for wrong in ((4,), (6,), (5, 4)):
        with pytest.raises(StaleRolloutError, match=r"step 5, prompt p7, response 0 of instance-3.*accepts only 5"):
            schedule(mode).check_versions(group(5, *wrong))


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
        bounded.check_versions(group(5, version))
    with pytest.raises(StaleRolloutError, match="version 2.*'bounded' accepts only 3 to 5"):
        bounded.check_versions(group(5, 2))
    assert list(bounded.accepted(1)) == [0, 1]


def test_staleness_is_that_of_the_oldest_token():
    assert [response_staleness(5, response) for response in group(5, 3, 5).responses] == [2]
    assert (
        response_staleness(
            5,
            Response(
                token_ids=(),
                logprobs=(),
                versions=(),
                loss_mask=(),
                finish_reason="stop",
                text="",
                seed=0,
                instance="i",
            ),
        )
        == 0
    )


def test_a_response_that_was_continued_is_as_stale_as_its_oldest_token_and_every_token_is_checked():
    assert not Schedule.of(Train(mode="one_step_off"), partial=True).exact  # weights do not wait for it
    bounded = schedule("bounded", max_staleness=2)
    bounded.check_versions(group(5, 3, 4, 5))
    with pytest.raises(StaleRolloutError, match="version 2"):
        bounded.check_versions(group(5, 2, 5))
