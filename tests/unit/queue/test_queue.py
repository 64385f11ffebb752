import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.queue.codec import group_from_wire, group_to_wire, pack, unpack
from engine.queue.store import SampleQueue
from engine.types import Group, Prompt, Response, Score


def group(index, step=0):
    response = Response((5, 6), (-0.5, -1.25), ((0, 3),), (True, False), "stop", "añ", 2**62, "instance-0")
    return Group(step, index, Prompt("id", "1+1=", "2", (1, 2, 3)), (response,), (Score(1.0),))


def test_codec_round_trip_without_columns():
    sent = group(4)
    with_columns = dataclasses.replace(sent, prompt=dataclasses.replace(sent.prompt, columns={"secret": object()}))
    assert group_from_wire(unpack(pack(group_to_wire(with_columns)))) == sent


def test_arrival_order_and_exactly_once():
    queue = SampleQueue(0, 3)
    for index in (2, 0, 1):
        queue.put(group(index))
    assert [queue.lease("a").index, queue.lease("b").index, queue.lease("a").index] == [2, 0, 1]
    assert queue.lease("a") is None
    for replica, index in (("a", 2), ("b", 0), ("a", 1)):
        assert not queue.done
        queue.acknowledge(index, replica)
    assert queue.done


def test_prompt_order_waits_for_the_next_prompt():
    queue = SampleQueue(0, 3, order="prompt_order")
    queue.put(group(1))
    assert queue.lease("a") is None
    queue.put(group(0))
    assert [queue.lease("a").index, queue.lease("a").index, queue.lease("a")] == [0, 1, None]


def test_sync_leases_nothing_before_the_last_group_is_in():
    queue = SampleQueue(0, 2, hold=True)
    queue.put(group(1))
    assert queue.lease("a") is None
    queue.put(group(0))
    assert queue.lease("a").index == 1


def test_a_dead_replicas_groups_come_back():
    queue = SampleQueue(0, 2)
    queue.put(group(0))
    queue.put(group(1))
    queue.lease("dead")
    queue.lease("alive")
    assert queue.give_back("dead") == [0]
    assert queue.lease("alive").index == 0
    with pytest.raises(ValueError, match="no lease"):
        queue.acknowledge(0, "dead")


def test_foreign_and_double_groups_are_refused():
    queue = SampleQueue(0, 2)
    queue.put(group(0))
    for wrong in (group(0), group(2), group(1, step=1)):
        with pytest.raises(ValueError, match="does not belong"):
            queue.put(wrong)


@given(st.permutations(range(6)), st.sampled_from(["arrival", "prompt_order"]), st.booleans())
def test_every_group_is_trained_once_whatever_the_arrival(arrival, order, hold):
    queue = SampleQueue(0, 6, order, hold)
    trained = []
    for index in arrival:
        queue.put(group(index))
        while (leased := queue.lease("a")) is not None:
            queue.acknowledge(leased.index, "a")
            trained.append(leased.index)
    assert queue.done
    assert trained == (list(range(6)) if order == "prompt_order" else arrival)
