"""Ranks of a scorer that die or hang: they are started again, what they held is given again, and the run fails if that
does not help."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.errors import BadInput, ServiceConflict
from engine.orchestrator import leases, scorer_process
from engine.orchestrator.leases import Leases
from engine.orchestrator.run_state import RunState
from engine.orchestrator.scorer_process import ScorerProcess
from engine.orchestrator.stages import stages_of
from engine.orchestrator.steps import Steps
from engine.run.folder import RunFolder
from engine.wire.columns import REFERENCE, pack_group, pack_values
from engine.wire.messages import TRAIN, Lease, WriteColumns, Written
from support.policies import a_group
from support.runs import config_of

STAGE = "reference"
LEASE_S = 5.0


@pytest.fixture
def config():
    return config_of(
        {
            "algorithm.kl_coef": 0.1,
            "stages.reference.lease_s": LEASE_S,
            "stages.reference.wait_s": 20,
            "train.prompts_per_step": 4,
        }
    )


@pytest.fixture
def table(config):
    table = Steps(stages_of(config, None))
    table.begin(0, 4)
    for index in range(2):
        table.add_row(pack_group(a_group(index=index)))
    return table


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    for module in (scorer_process, leases):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def leased(table, now, replica_group=0):
    return table.lease_window(stage=STAGE, step=None, replica_group=replica_group, budget=1, consumer="scorer", now=now)


def write(table, held):
    table.write_columns(STAGE, held.number, [written(table, index) for index in held.indices])


def written(table, index):
    values = np.zeros(sum(table.find_row(0, index).lengths), np.float32)
    return Written(index, (pack_values(REFERENCE, values),))


class FakeChild:
    def __init__(self):
        self.alive = True
        self.stopped = False

    def stop(self, grace_s):
        self.stopped = True
        self.alive = False

    def how_it_ended(self):
        return "exited with 1; its log scorer-reference.log is empty"


@pytest.fixture
def plane(config, table, tmp_path):
    async def stop_run(error):
        plane.failure = error

    watched = Leases(config=config, run_state=RunState(), steps=table, folder=RunFolder(tmp_path), publishes=None)
    plane = SimpleNamespace(leases=watched, failure=None, is_over=False, stop_run=stop_run)
    return plane


@pytest.fixture
def started():
    return []


@pytest.fixture
def changed():
    """Why the ranks may not be started again."""
    return []


@pytest.fixture
def scorer(started, changed):
    def start():
        started.append(FakeChild())
        return started[-1]

    def check():
        if changed:
            raise BadInput(changed[0])

    return ScorerProcess(STAGE, 2, start, check)


async def test_ranks_that_would_load_other_weights_are_not_started(scorer, started, changed, plane):
    changed.append("its weights changed")
    started[0].alive = False
    await scorer.check_ranks(plane)
    assert len(started) == 1
    assert str(plane.failure) == f"the stage '{STAGE}' is not started again: its weights changed"
    assert isinstance(plane.failure, BadInput)


async def test_what_dead_ranks_held_is_given_to_the_next_ones_at_once(scorer, started, plane, table, clock):
    held = leased(table, clock.now)
    started[0].alive = False
    await scorer.check_ranks(plane)
    assert len(started) == 2
    await scorer.check_ranks(plane)
    assert len(started) == 2, "an expired lease is no sign of a scorer that hangs"
    again = leased(table, clock.now)
    assert (again.indices, again.deliveries) == (held.indices, 2)
    with pytest.raises(ServiceConflict, match="the ranks that held it are gone.*drop what was computed"):
        write(table, held)
    write(table, again)


async def test_ranks_that_hold_a_window_too_long_are_ended(scorer, started, plane, table, clock):
    leased(table, clock.now)
    for seconds, stopped in ((LEASE_S, False), (0.1, True)):
        clock.now += seconds
        await scorer.check_ranks(plane)
        assert started[0].stopped == stopped
    assert len(started) == 2


async def test_ranks_that_have_asked_and_ask_no_more_while_rows_wait_are_ended(scorer, started, plane, clock):
    clock.now += 10 * LEASE_S
    await scorer.check_ranks(plane)
    assert len(started) == 1, "they load their model"
    await plane.leases.lease_window(Lease(stage=STAGE, budget=0))
    clock.now += LEASE_S + 0.1
    await scorer.check_ranks(plane)
    assert len(started) == 2
    clock.now += 10 * LEASE_S
    await scorer.check_ranks(plane)
    assert len(started) == 2, "the next ones load theirs"


async def test_the_run_fails_by_name_after_too_many_ends_without_progress(scorer, started, plane, table, clock):
    for _ in range(2):
        started[-1].alive = False
        await scorer.check_ranks(plane)
    held = leased(table, clock.now)
    rows = tuple(written(table, index) for index in held.indices)
    await plane.leases.write_columns(WriteColumns(stage=STAGE, lease=held.number, rows=rows))
    for _ in range(2):
        started[-1].alive = False
        await scorer.check_ranks(plane)
    assert plane.failure is None
    assert len(started) == 5
    leased(table, clock.now)
    clock.now += LEASE_S + 1
    await scorer.check_ranks(plane)
    said = str(plane.failure)
    assert (
        "the stage 'reference' has made no progress in the 3 starts of its ranks (stages.reference.restarts = 2)"
        in said
    )
    assert "they have held groups [1] of step 0 for more than 5 s (stages.reference.lease_s)" in said
    assert "its log scorer-reference.log" in said
    assert len(started) == 5


@pytest.mark.parametrize("ended", ["is over", "fails"])
async def test_a_run_that_ends_starts_nothing_again(ended, scorer, started, plane):
    plane.is_over = ended == "is over"
    plane.failure = None if plane.is_over else ValueError("why")
    started[0].alive = False
    await scorer.check_ranks(plane)
    assert len(started) == 1


def test_a_stage_that_nobody_serves_is_named_with_its_log(plane):
    assert plane.leases.late_stage(100.0) == ""
    assert plane.leases.late_stage(121.0).endswith("/logs/scorer-reference.log")


@pytest.mark.parametrize("trainers", [None, 60.0])
def test_leases_of_our_own_scorers_have_no_deadline_because_the_orchestrator_watches_their_ranks(config, trainers):
    stages = {stage.name: stage for stage in stages_of(config, trainers)}
    assert (stages[STAGE].lease_s, stages[TRAIN].lease_s) == (None, trainers)
