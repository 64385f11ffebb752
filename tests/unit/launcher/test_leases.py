"""Two policies over one ledger: a lease of our own trainer lasts as long as its attempt; what a program outside does
not acknowledge in time is given again, and counts once."""

import pytest

from engine.errors import ServiceConflict
from engine.launcher.leases import AttemptLeases, DeadlineLeases
from engine.launcher.sample_queue import SampleQueue
from engine.wire.messages import Lease
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
    return DeadlineLeases(LEASE_S, clock)


def queue_of(count, **given):
    queue = SampleQueue(step=3, expected=count, **given)
    for index in range(count):
        queue.put(seal_group(numbered_group(index, 3)))
    return queue


def asked(consumer="one", budget=1, trained=(), unit=None):
    return Lease(step=3, consumer=consumer, budget=budget, trained=trained, unit=unit)


def trained(*windows, unit=None):
    return asked(trained=tuple(window.lease for window in windows), unit=unit)


def indices(groups):
    return [one.index for one in groups]


def test_a_unit_acknowledges_its_windows_once_and_nobody_elses(clock):
    leases = AttemptLeases(clock)
    queue = queue_of(3, units=2)
    first, second = (leases.give(queue, asked("", unit=unit)) for unit in (0, 1))
    assert (indices(first.groups), indices(second.groups), first.lease_s) == ([0], [1], None)
    with pytest.raises(ValueError, match="unit 0 of the trainer holds no lease on group 1 of step 3"):
        leases.acknowledge(trained(second, unit=0))
    third = leases.give(queue, asked("", unit=0))
    assert leases.acknowledge(trained(first, third, unit=0)) == [*first.groups, *third.groups]
    with pytest.raises(ValueError, match="unit 0 of the trainer holds no lease 1 of step 3"):
        leases.acknowledge(trained(first, unit=0))


def test_a_lease_of_our_own_trainer_is_never_given_again(clock):
    leases = AttemptLeases(clock)
    queue = queue_of(1)
    window = leases.give(queue, asked("", unit=0))
    clock.now = 1e9
    assert leases.give(queue, asked("", unit=0)) is None
    leases.acknowledge(trained(window, unit=0))
    assert queue.done


def test_groups_are_given_once_while_their_lease_lasts(leases, clock):
    queue = queue_of(2)
    first = leases.give(queue, asked("one"))
    assert (indices(first.groups), first.lease_s) == ([0], LEASE_S)
    clock.now = LEASE_S
    assert indices(leases.give(queue, asked("two")).groups) == [1]
    assert leases.give(queue, asked("two")) is None


@pytest.mark.parametrize("order", ["arrival", "prompt_order"])
def test_groups_of_a_consumer_that_died_are_given_again_and_count_once(leases, clock, order):
    queue = queue_of(2, order=order)
    dead = leases.give(queue, asked("dead", 10**6))
    assert (indices(dead.groups), dead.deliveries) == ([0, 1], 1)
    clock.now = LEASE_S + 1
    again = leases.give(queue, asked("other"))
    assert (indices(again.groups), again.deliveries) == ([0, 1], 2), "the same window, whatever the budget"
    with pytest.raises(ServiceConflict, match=r"given to 'other'; drop the gradient"):
        leases.acknowledge(trained(dead))
    assert not queue.done
    assert indices(leases.acknowledge(trained(again))) == [0, 1]
    assert queue.done


def test_a_late_acknowledgement_is_in_time_if_nobody_got_the_groups_since(leases, clock):
    queue = queue_of(1)
    slow = leases.give(queue, asked("slow"))
    clock.now = 100 * LEASE_S
    leases.acknowledge(trained(slow))
    assert queue.done


def test_an_acknowledgement_that_is_sent_twice_counts_once(leases):
    queue = queue_of(1)
    given = leases.give(queue, asked())
    assert indices(leases.acknowledge(trained(given))) == [0]
    assert leases.acknowledge(trained(given)) == []
    assert queue.done


def test_an_unknown_lease_is_refused(leases):
    with pytest.raises(ServiceConflict, match="there is no lease 7"):
        leases.acknowledge(asked(trained=(7,)))


@pytest.mark.parametrize("order", ["arrival", "prompt_order"])
def test_a_step_that_is_begun_again_gives_all_groups_again(leases, order):
    queue = queue_of(3, order=order)
    old = leases.give(queue, asked())
    leases.acknowledge(trained(old))
    held = leases.give(queue, asked())
    leases.begin_again(queue)
    for one in (old, held):
        with pytest.raises(ServiceConflict, match="begun the step again"):
            leases.acknowledge(trained(one))
    new = leases.give(queue, asked(budget=10**6))
    assert sorted(indices(new.groups)) == [0, 1, 2]
    leases.acknowledge(trained(new))
    assert queue.done


def test_leases_of_one_step_are_not_given_in_another(leases, clock):
    queue = queue_of(1)
    leases.give(queue, asked("dead"))
    clock.now = 2 * LEASE_S
    assert leases.give(SampleQueue(step=4, expected=1), asked()) is None
