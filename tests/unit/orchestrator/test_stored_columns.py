"""Columns in a store whose rows are lost, changed or slow. The store is a dictionary: the real one is tried in
tests/integration/test_transferqueue.py."""

import asyncio

import msgspec
import pytest

from engine.errors import ServiceConflict, StoreError
from engine.orchestrator.stored_columns import RESTARTS, StoredColumns
from engine.types import Score
from engine.wire.columns import GENERATED, LOGPROBS, PROMPT, RESPONSES, SCORES, pack_group, pack_scores
from engine.wire.store_client import StoreFault
from support.groups import numbered_group


def group(index, step=0):
    return pack_group(numbered_group(index, step))


def same(found, expected):
    return [column_by_name(row) for row in found] == [column_by_name(row) for row in expected]


def column_by_name(row):
    return msgspec.structs.replace(row, columns=()), {column.name: column for column in row.columns}


class Rows:
    """A store in a dictionary, of which a part can be lost or out of order."""

    addresses = "here"

    def __init__(self):
        self.rows = {}
        self.got = []
        self.starts = 0
        self.told = []
        self.broken = False
        self.failure = None

    async def start_store(self):
        self.starts += 1
        self.rows = {}
        self.broken = False
        await asyncio.sleep(0.01)

    async def _reach(self):
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure

    async def put_columns(self, step, index, bodies):
        await self._reach()
        if self.broken:
            raise StoreFault("put")
        self.rows.setdefault((step, index), {}).update(bodies)

    async def get_columns(self, step, index, names):
        await self._reach()
        if (step, index) not in self.rows:
            raise StoreFault("get")
        self.got.append(list(names))
        return {name: self.rows[step, index][name] for name in names}

    async def clear_rows(self, step, indices):
        await self._reach()
        if self.broken:
            raise StoreFault("clear")
        for index in indices:
            del self.rows[step, index]

    async def close(self):
        pass


def stored():
    rows = Rows()
    again = []

    async def generate(step, index):
        again.append((step, index))
        await asyncio.sleep(0.01)
        return group(index, step)

    return StoredColumns(rows, generate, tell=rows.told.append), rows, again


async def filled(count=4):
    groups, rows, again = stored()
    kept = [await groups.keep_columns(group(index)) for index in range(count)]
    assert all(not one.column(name).body for one in kept for name in GENERATED)
    assert all(one.column(SCORES) == group(one.index).column(SCORES) for one in kept)
    assert all(stored.keys() == set(GENERATED) for stored in rows.rows.values())
    return groups, rows, again, kept


async def test_what_is_put_comes_back_with_the_queues_mini_batch_and_is_freed_after_the_step():
    groups, rows, again, kept = await filled()
    opened = await groups.open([msgspec.structs.replace(kept[2], mini_batch=1), kept[0]])
    assert same(opened, [msgspec.structs.replace(group(2), mini_batch=1), group(0)])
    groups.trained(0, [2, 0])
    groups.forget_step(0)
    await groups.keep_columns(group(0, step=1))
    assert rows.rows.keys() == {(1, 0)}
    with pytest.raises(ServiceConflict, match="step 0 is over"):
        await groups.open(kept[1:2])
    assert not again
    assert not rows.starts


async def test_lost_rows_are_generated_again_and_the_others_are_kept():
    groups, rows, again, kept = await filled()
    rows.broken = True
    del rows.rows[0, 1], rows.rows[0, 3]
    first, second = await asyncio.gather(groups.open(kept[:2]), groups.open(kept[2:]))
    assert same(first + second, [group(index) for index in range(4)])
    assert sorted(again) == [(0, 1), (0, 3)]
    assert groups.generated_again == 2
    assert rows.starts == 1  # once for both windows
    (told,) = rows.told
    assert told.startswith(
        "TransferQueue was restarted, and has lost 2 of 4 groups; those that are not trained yet are"
    )


async def test_bodies_can_be_fetched_elsewhere_unless_they_are_on_their_way_there_again():
    groups, rows, _, kept = await filled()
    assert groups.where(kept) == "here"
    rows.rows[0, 1][LOGPROBS] = b"damaged"
    opening = asyncio.create_task(groups.open(kept[1:2]))
    while groups.where(kept) is not None:
        await asyncio.sleep(0)
    assert groups.where([kept[0], kept[2]]) == "here"
    await opening
    assert groups.where(kept) == "here"
    rows.rows.clear()
    opening = asyncio.create_task(groups.open(kept))
    while rows.starts == 0:
        await asyncio.sleep(0)
    assert groups.where([]) is None  # it is being started again
    await opening
    assert groups.where(kept) == "here"


async def test_only_the_columns_that_a_stage_needs_are_fetched():
    groups, rows, _, kept = await filled(1)
    opened = await groups.open([kept[0].only([PROMPT, RESPONSES])])
    assert same(opened, [group(0).only([PROMPT, RESPONSES])])
    assert await groups.open([kept[0].only([SCORES])]) == [group(0).only([SCORES])]
    assert rows.got == [[PROMPT, RESPONSES]]


async def test_scores_that_come_after_the_responses_stay_in_the_table():
    groups, rows, _, _ = await filled(1)
    scores = group(0).only([SCORES])
    assert await groups.keep_columns(scores) == scores
    assert rows.rows[0, 0].keys() == set(GENERATED)


async def test_a_row_that_is_generated_again_has_its_new_scores_and_lengths():
    rows = Rows()
    other = group(0).with_columns([pack_scores([Score(0.25)])])
    other = msgspec.structs.replace(other, tokens=99, lengths=(96,))

    async def generate(step, index):
        return other

    groups = StoredColumns(rows, generate)
    kept = await groups.keep_columns(group(0))
    rows.rows.clear()
    assert same(await groups.open([kept]), [other])
    assert same(await groups.open([kept.only([LOGPROBS])]), [other.only([LOGPROBS])])


async def test_restarts_in_a_long_run_are_counted_anew_after_each_trained_group():
    groups, rows, _, kept = await filled(RESTARTS + 2)
    for one in kept[:-1]:
        rows.broken = True
        await groups.keep_columns(group(9, step=1))
        groups.trained(0, [one.index])
    assert rows.starts == RESTARTS + 1


async def test_trained_groups_are_not_generated_again():
    groups, rows, again, kept = await filled()
    groups.trained(0, [0, 1])
    rows.rows.clear()
    rows.broken = True
    assert same(await groups.open(kept[2:]), [group(2), group(3)])
    assert sorted(again) == [(0, 2), (0, 3)]
    assert groups.where(kept) is None
    assert groups.where(kept[2:]) == "here"
    groups.forget_step(0)
    await groups.keep_columns(group(0, step=1))  # clears what came again, and not what went with the store
    assert rows.rows.keys() == {(1, 0)}


async def test_a_lost_row_that_is_trained_is_generated_again_for_a_trainer_that_begins_again():
    groups, rows, again, kept = await filled(2)
    groups.trained(0, [0, 1])
    rows.rows.clear()
    rows.broken = True
    await groups.keep_columns(group(2))
    assert not again
    assert same(await groups.open(kept), [group(0), group(1)])
    assert sorted(again) == [(0, 0), (0, 1)]


async def test_a_row_that_comes_after_its_step_is_not_kept():
    groups, rows, again, kept = await filled(1)
    rows.rows.clear()
    opening = asyncio.create_task(groups.open(kept))
    while not again:
        await asyncio.sleep(0)
    groups.forget_step(0)
    with pytest.raises(ServiceConflict, match="step 0 is over"):
        await opening
    assert not rows.rows


async def test_a_put_that_meets_a_broken_store_is_made_again():
    groups, rows, again, kept = await filled(2)
    rows.broken = True
    rows.rows.clear()
    late = await groups.keep_columns(group(2))
    assert same(await groups.open([*kept, late]), [group(index) for index in range(3)])
    assert rows.starts == 1


@pytest.mark.parametrize("name", GENERATED)
async def test_a_row_with_a_changed_column_is_generated_again_without_a_restart(name):
    groups, rows, again, kept = await filled()
    rows.rows[0, 1][name] = rows.rows[0, 1][name][:-1] + b"\xee"
    opened = await groups.open(kept)
    assert same(opened, [group(index) for index in range(4)])
    assert again == [(0, 1)]
    assert not rows.starts


async def test_a_store_that_loses_everything_is_not_started_again_for_ever():
    groups, rows, again, kept = await filled(2)

    async def put(step, index, bodies):
        pass

    rows.put_columns = put
    rows.rows.clear()
    with pytest.raises(StoreError, match="was restarted 3 times in a row, and still fails: get"):
        await groups.open(kept)
    assert rows.starts == RESTARTS
    await groups.close()


async def test_a_store_that_does_not_work_after_its_restart_is_named():
    groups, rows, _, kept = await filled(2)
    del rows.rows[0, 1]
    start = rows.start_store

    async def broken():
        await start()
        rows.broken = True

    rows.start_store = broken
    with pytest.raises(StoreError, match="was restarted, but does not work: put"):
        await groups.open(kept)


async def test_an_error_of_the_store_reaches_whoever_waits():
    groups, rows, _, kept = await filled()
    rows.failure = StoreError("the controller has not answered")
    with pytest.raises(StoreError, match="the controller"):
        await groups.open(kept)
    with pytest.raises(StoreError, match="the controller"):
        await groups.keep_columns(group(5))


async def test_closing_ends_what_is_being_generated():
    started = asyncio.Event()

    async def never(step, index):
        started.set()
        await asyncio.Event().wait()

    rows = Rows()
    groups = StoredColumns(rows, never)
    kept = await groups.keep_columns(group(0))
    rows.rows.clear()
    opening = asyncio.create_task(groups.open([kept]))
    await started.wait()
    await groups.close()
    with pytest.raises(asyncio.CancelledError):
        await opening
