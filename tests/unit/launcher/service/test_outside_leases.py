"""Leases with a deadline: what is not acknowledged in time is given again, and counts once."""

import pytest

from engine.errors import ServiceConflict
from engine.launcher.sample_queue import SampleQueue
from engine.launcher.service.outside_leases import OutsideLeases
from engine.wire.sealed import seal_group
from support.groups import numbered_group

LEASE_S = 10.0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def leases(clock):
    return OutsideLeases(LEASE_S, clock)


def queue_of(count, **given):
    queue = SampleQueue(step=3, expected=count, **given)
    for index in range(count):
        queue.put(seal_group(numbered_group(index, 3)))
    return queue


def indices(given):
    return [one.index for one in given.window.groups]


def test_groups_are_given_once_while_their_lease_lasts(leases, clock):
    queue = queue_of(2)
    assert indices(leases.give(queue, "one", 1)) == [0]
    clock.now = LEASE_S
    assert indices(leases.give(queue, "two", 1)) == [1]
    assert leases.give(queue, "two", 1) is None


@pytest.mark.parametrize("order", ["arrival", "prompt_order"])
def test_groups_of_a_consumer_that_died_are_given_again_and_count_once(leases, clock, order):
    queue = queue_of(2, order=order)
    dead = leases.give(queue, "dead", 10**6)
    assert (indices(dead), dead.deliveries) == ([0, 1], 1)
    clock.now = LEASE_S + 1
    again = leases.give(queue, "other", 1)
    assert (indices(again), again.deliveries) == ([0, 1], 2), "the same window, whatever the budget"
    with pytest.raises(ServiceConflict, match=r"given to 'other'; drop the gradient"):
        leases.acknowledge(dead.lease)
    assert not queue.done
    leases.acknowledge(again.lease)
    assert queue.done


def test_a_late_acknowledgement_is_in_time_if_nobody_got_the_groups_since(leases, clock):
    queue = queue_of(1)
    slow = leases.give(queue, "slow", 1)
    clock.now = 100 * LEASE_S
    leases.acknowledge(slow.lease)
    assert queue.done


def test_an_acknowledgement_that_is_sent_twice_counts_once(leases):
    queue = queue_of(1)
    given = leases.give(queue, "one", 1)
    leases.acknowledge(given.lease)
    leases.acknowledge(given.lease)
    assert queue.done


def test_an_unknown_lease_is_refused(leases):
    with pytest.raises(ServiceConflict, match="there is no lease 7"):
        leases.acknowledge(7)


@pytest.mark.parametrize("order", ["arrival", "prompt_order"])
def test_a_step_that_is_begun_again_gives_all_groups_again(leases, order):
    queue = queue_of(3, order=order)
    trained = leases.give(queue, "one", 1)
    leases.acknowledge(trained.lease)
    held = leases.give(queue, "one", 1)
    leases.begin_again(queue)
    for old in (trained, held):
        with pytest.raises(ServiceConflict, match="begun the step again"):
            leases.acknowledge(old.lease)
    new = leases.give(queue, "one", 10**6)
    assert sorted(indices(new)) == [0, 1, 2]
    leases.acknowledge(new.lease)
    assert queue.done


def test_leases_of_one_step_are_not_given_in_another(leases, clock):
    queue = queue_of(1)
    leases.give(queue, "dead", 1)
    clock.now = 2 * LEASE_S
    assert leases.give(SampleQueue(step=4, expected=1), "one", 1) is None
