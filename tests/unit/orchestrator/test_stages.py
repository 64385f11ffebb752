"""Which stage is late, and what a stage may write."""

import numpy as np
import pytest
from msgspec.structs import replace

from engine.config import Config
from engine.errors import BadInput
from engine.orchestrator.leases import Leases
from engine.orchestrator.run_state import RunState
from engine.orchestrator.stages import check_columns, stages_of
from engine.orchestrator.steps import Steps
from engine.run.folder import RunFolder
from engine.wire.columns import Column, ValuesColumn, pack_column, pack_group, pack_values
from engine.wire.messages import TRAIN, Lease, WriteColumns, Written
from support.groups import numbered_group

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


async def test_a_stage_or_a_row_that_is_not_there_is_refused_by_name(watched):
    leases, _ = watched
    with pytest.raises(BadInput, match=r"no stage 'other' in the recipe, whose stages are critic, judge, train"):
        await leases.lease_window(Lease(stage="other", budget=1))
    window = await leases.lease_window(Lease(stage="judge", budget=1))
    with pytest.raises(BadInput, match="step 0 has no group 9"):
        await leases.write_columns(WriteColumns(stage="judge", lease=window.lease, rows=(Written(9, ()),)))


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
    "no array": (pack_column("values", [1, 2]), "is malformed"),
    "no numbers": (pack_column("values", ["U1", [2], b"ab"]), "is malformed|not finite numbers"),
    "damaged": (Column("values", bytes(16), b"other"), "differ from those that were packed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_column_of_the_row_is_refused_by_name(watched, name):
    column, said = WRONG[name]
    with pytest.raises(BadInput, match=f"step 0, group 1.*column '{column.name}'.*({said})"):
        check_columns(watched[1].find_row(0, 1), Written(1, (column,)), ["mark"])
