"""Which stage is late, whose lease is whose, what a consumer gets, and what a stage may write."""

import numpy as np
import pytest
from msgspec.structs import replace

from engine.config import Config
from engine.errors import BadInput, ServiceConflict
from engine.orchestrator.leases import Leases
from engine.orchestrator.run_state import RunState
from engine.orchestrator.stages import check_columns, stages_of
from engine.orchestrator.steps import StageRules, Steps
from engine.run.folder import RunFolder
from engine.wire.columns import OWN, SCORES, Column, ValuesColumn, pack_column, pack_group, pack_values
from engine.wire.messages import TRAIN, Lease, Written
from support.groups import numbered_group
from support.rows import row_of, written_of

WAIT_S = 30.0
JUDGE = {"needs": ["responses"], "gives": ["mark"], "wait_s": WAIT_S, "reward_weight": 0.5}
CRITIC = {"needs": ["responses"], "gives": ["values"]}


def windows_of(lease_s, **tables):
    config = Config(train={"micro_batch_tokens": 10, "prompts_per_step": 40}, **tables)
    table = Steps(stages_of(config, lease_s))
    table.begin(0, 40)
    for index in range(20):
        table.add_row(replace(pack_group(numbered_group(index)), tokens=5))
    found = iter(lambda: table.lease_window(TRAIN, 0, 0, config.window_tokens), None)
    return [len(held.indices) for held in found]


def test_our_own_trainer_gets_windows_that_wait_as_one():
    assert windows_of(None) == [8, 8, 2, 2]
    assert windows_of(60.0) == [2] * 10, "a program outside may train a window in one pass"
    assert windows_of(None, parallel={"pipeline": 2}) == [20], "a pipeline fills and drains once for all"


@pytest.fixture
def watched(tmp_path):
    """(leases, steps) with two rows, of one response of two tokens each, that wait for two stages."""
    config = Config(stages={"judge": JUDGE, "critic": CRITIC}, train={"prompts_per_step": 2})
    table = Steps(stages_of(config, None))
    table.begin(0, 2)
    for index in range(2):
        table.add_row(pack_group(numbered_group(index)))
    return Leases(config=config, run_state=RunState(), steps=table, folder=RunFolder(tmp_path), publishes=None), table


async def test_a_stage_for_which_rows_wait_without_progress_is_named(watched):
    watch, table = watched
    assert [watch.late_stage(now) for now in (0.0, WAIT_S)] == ["", ""]
    said = r"2 groups of steps [0] have waited 30 s (stages.judge.wait_s) for the stage 'judge': no program has asked"
    assert watch.late_stage(WAIT_S + 1).startswith(said)
    await watch.lease_window(Lease(stage="judge", budget=0))
    assert watch.late_stage(WAIT_S + 1).endswith("it makes no progress")
    held = table.lease_window("judge", 0, 0, 1)
    table.write_columns("judge", held.number, [Written(held.indices[0], (pack_values("mark", np.ones(1)),))])
    assert watch.late_stage(WAIT_S + 2) == "", "it has made progress"
    assert watch.status() == {
        "train": {"waiting": 0, "done": 0},
        "judge": {"waiting": 1, "done": 1},
        "critic": {"waiting": 2, "done": 0},
    }
    table.end(0)
    assert watch.late_stage(10 * WAIT_S) == "", "nothing waits"


@pytest.mark.parametrize(
    "right", [("mark", np.ones(1)), ("values", np.ones(1)), ("values", np.ones(2)), ("values", np.arange(2))]
)
def test_a_number_for_each_response_or_token_is_taken(watched, right):
    check_columns(watched[1].find_row(0, 0), Written(0, (pack_values(*right),)), ["mark"])


WRONG = {
    "another length": (
        pack_values("values", np.ones(3)),
        r"shape \[3\], expected \[1\] \(responses\) or \[2\]",
    ),
    "a reward by token": (pack_values("mark", np.ones(2)), r"has the shape \[2\], expected \[1\] \(responses\)$"),
    "no shape": (pack_column("values", ValuesColumn("float64", (), bytes(8))), r"has the shape \[\], expected"),
    "a row by response": (
        pack_values("mark", np.ones((1, 3))),
        r"shape \[1, 3\], expected \[1\] \(responses\)$",
    ),
    "a column by token": (pack_values("values", np.ones((2, 1))), r"has the shape \[2, 1\], expected"),
    "infinite": (pack_values("values", np.array([1.0, np.inf])), "values that are not finite numbers"),
    "nan": (pack_values("mark", np.array([np.nan])), "values that are not finite numbers"),
    "infinite in fp32": (pack_values("values", np.array([1.0, -1e39])), "not finite numbers from -3.40282e.38 to"),
    "a larger reward than one may be": (pack_values("mark", np.array([1.1e6])), "numbers from -1e.06 to 1e.06"),
    "another byte order": (
        pack_column("values", ValuesColumn(">f4", (2,), np.array([1, 2], ">f4").tobytes())),
        "is malformed: the dtype '>f4' is written 'float32'",
    ),
    "two numbers in one": (pack_column("values", ValuesColumn("f4,f4", (2,), bytes(16))), "is malformed: the dtype"),
    "no array": (pack_column("values", [1, 2]), "is malformed"),
    "no numbers": (pack_column("values", ["U1", [2], b"ab"]), "is malformed|not finite numbers"),
    "damaged": (Column("values", bytes(16), b"other"), "differ from those that were packed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_column_of_the_row_is_refused_by_name(watched, name):
    column, said = WRONG[name]
    with pytest.raises(BadInput, match=f"step 0, group 1.*column '{column.name}'.*({said})"):
        check_columns(watched[1].find_row(0, 1), Written(1, (column,)), ["mark"])


# whose lease is whose -----------------------------------------------------------------------------

LEASE_S = 10.0


@pytest.fixture
def table():
    """Two rows of step 3, for a trainer outside and a stage that gives a column."""
    stages = [
        StageRules(TRAIN, frozenset(OWN), lease_s=LEASE_S),
        StageRules("judge", frozenset(OWN), frozenset({"mark"}), lease_s=LEASE_S),
    ]
    table = Steps(stages)
    table.begin(3, 2)
    for index in range(2):
        table.add_row(row_of(3, index))
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
    table.expire(TRAIN)
    again = table.lease_window(TRAIN, 3, 0, 1, consumer="one", ahead=True)
    assert again.indices in (first.indices, ahead.indices), "the process of this name that had them at work is gone"


def test_a_consumer_gets_the_columns_that_it_asks_for_of_those_that_its_stage_needs(table):
    held = table.lease_window(TRAIN, 3, 0, 10**6)
    assert [row.names for row in table.given_rows(held, [SCORES])] == [{SCORES}] * 2
    with pytest.raises(BadInput, match="columns mark: the stage 'train' gets logprobs, prompt, responses, scores only"):
        table.check_asked(TRAIN, ["mark", SCORES])
