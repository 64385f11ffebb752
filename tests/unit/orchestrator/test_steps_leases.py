"""Cases of the leases on rows: whose lease is whose, what a consumer gets."""

import pytest

from engine.errors import BadInput, ServiceConflict
from engine.orchestrator.steps import StageRules, Steps
from engine.types import BatchScores, Score
from engine.wire.columns import GENERATED, OWN, SCORES, pack_scores
from engine.wire.messages import TRAIN
from support.rows import row_of, tokens_of, written_of

LEASE_S = 10.0


@pytest.fixture
def table():
    """Two rows of step 3, for a trainer outside and a stage that gives a column."""
    stages = [
        StageRules(TRAIN, frozenset(OWN), lease_s=LEASE_S, whole=True),
        StageRules("judge", frozenset(OWN), frozenset({"mark"}), lease_s=LEASE_S),
    ]
    table = Steps(stages)
    table.begin(3, 2)
    for index in range(2):
        scores = pack_scores([Score(float(index)), Score(0.5)])
        table.add_row(row_of(3, index, GENERATED).with_columns([scores]))
    return table


def test_rows_of_a_consumer_that_died_are_given_again_as_they_were_and_the_late_one_is_told_to_drop_them(table):
    dead = {stage: table.lease_window(stage, 3, 0, 10**6, consumer="dead") for stage in (TRAIN, "judge")}
    again = {stage: table.lease_window(stage, None, 0, 1, consumer="other", now=LEASE_S + 1) for stage in dead}
    assert [again[stage].indices for stage in dead] == [(0, 1), (0, 1)], "the same window, whatever the budget"
    with pytest.raises(ServiceConflict, match=r"not done within 10 s, and were given to 'other'; drop the gradient"):
        table.acknowledge_lease(dead[TRAIN].number)
    with pytest.raises(ServiceConflict, match=r"were given to 'other'; drop what was computed"):
        table.write_columns("judge", dead["judge"].number, written_of((0, 1), {"mark"}))
    table.again(3)
    with pytest.raises(ServiceConflict, match="the trainer has since restarted the step; drop the gradient"):
        table.acknowledge_lease(again[TRAIN].number)
    assert table.write_columns("judge", again["judge"].number, written_of((0, 1), {"mark"})), "that stage has not"


def test_a_consumer_that_asks_ahead_is_not_given_again_what_it_has_at_work(table):
    first = table.lease_window(TRAIN, 3, 0, 1, consumer="one")
    ahead = table.lease_window(TRAIN, 3, 0, 1, consumer="one", now=LEASE_S + 1, ahead=True)
    assert {*first.indices, *ahead.indices} == {0, 1}
    assert table.lease_window(TRAIN, 3, 0, 1, consumer="one", now=3 * LEASE_S, ahead=True) is None
    assert table.lease_window(TRAIN, 3, 0, 1, consumer="one", now=3 * LEASE_S).indices == first.indices, "it began anew"


def test_a_consumer_gets_the_columns_that_it_asks_for_of_those_that_its_stage_needs(table):
    held = table.lease_window(TRAIN, 3, 0, 10**6)
    assert [row.names for row in table.given_rows(held, [SCORES])] == [{SCORES}] * 2
    with pytest.raises(BadInput, match="columns mark: the stage 'train' gets logprobs, prompt, responses, scores only"):
        table.check_asked(TRAIN, ["mark", SCORES])


def test_the_scores_of_the_whole_batch_come_with_its_rows_where_the_advantages_need_them(table):
    lengths = ((tokens_of(0),), (tokens_of(1),))
    assert table.batch_scores(3, {}) == BatchScores(((0.0, 0.5), (1.0, 0.5)), lengths)
    part = Steps([StageRules(TRAIN, frozenset(OWN))])
    part.begin(0, 1)
    assert part.batch_scores(0, {}) is None
