import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.launcher.sample_queue import SampleQueue
from engine.types import Landed, Score
from engine.wire.codec import open_group, open_landed, pack_group, pack_landed
from engine.wire.messages import EarlyWork, Window, pack, read_message
from tests.support.groups import numbered_group as group


def test_codec_round_trip_without_columns():
    sent = group(4)
    with_columns = dataclasses.replace(sent, prompt=dataclasses.replace(sent.prompt, columns={"secret": object()}))
    window = read_message(pack(Window((pack_group(with_columns),))))
    assert [open_group(group) for group in window.groups] == [sent]


def test_half_a_character_crosses_as_a_question_mark():
    sent = dataclasses.replace(group(4), scores=(Score(1.0, "ok", "half \ud83d"),))
    (packed,) = read_message(pack(Window((pack_group(sent),)))).groups
    assert open_group(packed).scores == (Score(1.0, "ok", "half ?"),)


ONE = 1
"""A budget below any group: windows of one."""


def leased(queue, unit=0, budget=ONE):
    return [group.index for group in queue.lease(unit, budget)]


def test_arrival_order_and_exactly_once():
    queue = SampleQueue(0, 3, units=2)
    for index in (2, 0, 1):
        queue.put(group(index))
    assert [leased(queue), leased(queue, 1), leased(queue), leased(queue)] == [[2], [0], [1], []]
    for unit, index in ((0, 2), (1, 0), (0, 1)):
        assert not queue.done
        queue.acknowledge([index], unit)
    assert queue.done


def test_a_window_holds_what_is_there_up_to_its_budget():
    queue = SampleQueue(0, 4)
    for index in (2, 0, 1):
        queue.put(group(index))  # five tokens each
    assert leased(queue, budget=10) == [2, 0]
    assert leased(queue, budget=10) == [1]


def test_windows_in_prompt_order_are_a_function_of_the_ordered_groups():
    queue = SampleQueue(0, 4, order="prompt_order")
    for index in (1, 0):
        queue.put(group(index))
        assert leased(queue, budget=12) == []  # 0 and 1 fit; whether 2 does is not known before it is there
    queue.put(group(2))
    assert leased(queue, budget=12) == [0, 1]
    assert leased(queue, budget=12) == []
    queue.put(group(3))
    assert leased(queue, budget=12) == [2, 3]


def test_sync_leases_nothing_before_the_last_group_is_in():
    queue = SampleQueue(0, 2, hold=True)
    queue.put(group(1))
    assert leased(queue) == []
    queue.put(group(0))
    assert leased(queue) == [1]


def test_windows_in_prompt_order_go_to_the_units_in_turn_whoever_asks_first():
    queue = SampleQueue(0, 5, order="prompt_order", units=2)
    for index in range(5):
        queue.put(group(index))
    assert [leased(queue, 1, 10), leased(queue, 1, 10), leased(queue, 0, 10), leased(queue, 0, 10)] == [
        [2, 3],
        [],
        [0, 1],
        [4],
    ]


def test_a_unit_acknowledges_only_what_it_holds():
    queue = SampleQueue(0, 2, units=2)
    queue.put(group(0))
    assert leased(queue, 0) == [0]
    with pytest.raises(ValueError, match="no lease"):
        queue.acknowledge([0], 1)


def landed(index, number):
    return Landed(step=0, group=index, number=number, prompt=(1, 2, 3), token_ids=(5, 6))


def test_landed_responses_are_scored_once_by_one_unit_per_group_until_the_group_is_there():
    queue = SampleQueue(0, 2, units=2)
    for index, number in ((0, 0), (0, 1), (1, 0)):
        queue.land(landed(index, number))
    assert queue.early(0, 10) == [landed(0, 0), landed(0, 1)]
    queue.land(landed(0, 2))
    assert queue.early(1, 100) == [landed(1, 0)]  # group 0 is unit 0's
    queue.put(group(0))
    assert queue.early(0, 100) == []  # too late: its group is complete


def test_groups_go_first_to_the_unit_that_scored_them_but_wait_for_nobody():
    queue = SampleQueue(0, 3, units=2)
    for index, unit in ((0, 1), (1, 0)):
        queue.land(landed(index, 0))
        assert queue.early(unit, 100)
    for index in (0, 2, 1):
        queue.put(group(index))
    assert [leased(queue, 0), leased(queue, 0), leased(queue, 0)] == [[1], [2], [0]]


def test_landed_codec_round_trip():
    work = read_message(pack(EarlyWork((pack_landed(landed(3, 1)),))))
    assert [open_landed(one) for one in work.landed] == [landed(3, 1)]


def test_foreign_and_double_groups_are_refused():
    queue = SampleQueue(0, 2)
    queue.put(group(0))
    for wrong in (group(0), group(2), group(1, step=1)):
        with pytest.raises(ValueError, match="does not belong"):
            queue.put(wrong)


@given(st.permutations(range(6)), st.booleans(), st.integers(1, 40), st.integers(1, 3))
def test_every_group_is_trained_once_and_prompt_order_ignores_arrival(arrival, hold, budget, units):
    windows = {}
    for order in ("arrival", "prompt_order"):
        queue = SampleQueue(step=0, expected=6, order=order, hold=hold, units=units)
        windows[order] = []
        for index in arrival:
            queue.put(group(index))
            while found := [(unit, window) for unit in range(units) if (window := leased(queue, unit, budget))]:
                for unit, window in found:
                    queue.acknowledge(window, unit)
                    windows[order].append(window)
        assert queue.done
    assert sorted(sum(windows["arrival"], [])) == list(range(6))
    size = max(1, budget // 5)
    assert sorted(windows["prompt_order"]) == [list(range(6))[at : at + size] for at in range(0, 6, size)]
