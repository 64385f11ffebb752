import heapq
import random
from itertools import groupby
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.orchestrator.ledger import Ledger, Windows
from engine.trainer.ranks.packing import pack_parts

ONE = 1
"""A budget below any row: windows of one."""
TOKENS = 5
"""Of each row."""


def ledger_of(expected, ready=(), **windows):
    ledger = Ledger(expected, Windows(**windows))
    for index in ready:
        ledger.add_ready(index, TOKENS)
    return ledger


def taken(ledger, replica_group=0, budget=ONE):
    return ledger.take_window(replica_group, budget)


def test_arrival_order_and_exactly_once():
    ledger = ledger_of(3, ready=(2, 0, 1), replica_groups=2)
    assert [taken(ledger), taken(ledger, 1), taken(ledger), taken(ledger)] == [[2], [0], [1], []]
    for index in (2, 0, 1):
        assert not ledger.is_over
        ledger.finish_rows([index])
    assert ledger.is_over


def test_a_window_holds_what_is_there_up_to_its_budget():
    ledger = ledger_of(4, ready=(2, 0, 1))  # five tokens each
    assert taken(ledger, budget=10) == [2, 0]
    assert taken(ledger, budget=10) == [1]


def test_windows_in_prompt_order_are_a_function_of_the_ordered_rows():
    ledger = ledger_of(4, order="prompt_order")
    for index in (1, 0):
        ledger.add_ready(index, TOKENS)
        assert taken(ledger, budget=12) == []  # 0 and 1 fit; whether 2 does is not known before it is there
    ledger.add_ready(2, TOKENS)
    assert taken(ledger, budget=12) == [0, 1]
    assert taken(ledger, budget=12) == []
    ledger.add_ready(3, TOKENS)
    assert taken(ledger, budget=12) == [2, 3]


def test_sync_gives_nothing_before_the_last_row_is_in():
    ledger = ledger_of(2, hold=True)
    ledger.add_ready(1, TOKENS)
    assert taken(ledger) == []
    ledger.add_ready(0, TOKENS)
    assert taken(ledger) == [1]


def test_windows_in_prompt_order_go_to_the_units_in_turn_whoever_asks_first():
    ledger = ledger_of(5, ready=range(5), order="prompt_order", replica_groups=2)
    assert [taken(ledger, group, 10) for group in (1, 1, 0, 0)] == [[2, 3], [], [0, 1], [4]]


def test_only_what_was_given_is_done_and_once():
    ledger = ledger_of(3, ready=(0, 1))
    assert taken(ledger) == [0]
    for wrong in (1, 2, 7):
        with pytest.raises(ValueError, match="was not leased, or is already done"):
            ledger.finish_rows([wrong])
    ledger.finish_rows([0])
    with pytest.raises(ValueError, match="is already done"):
        ledger.finish_rows([0])
    assert (ledger.ready, ledger.done) == (2, 1)


def test_rows_that_are_ready_already_or_do_not_exist_are_refused():
    ledger = ledger_of(2, ready=(0,))
    for wrong in (0, 2, -1):
        with pytest.raises(ValueError, match="is already ready, or does not exist"):
            ledger.add_ready(wrong, TOKENS)


@pytest.mark.parametrize("order", ["arrival", "prompt_order"])
def test_a_step_that_is_begun_again_is_given_again_from_its_first_row_in_the_same_mini_batches(order):
    ledger = ledger_of(4, ready=(2, 0, 1, 3), order=order, updates=2)
    first = [taken_with_updates(ledger) for _ in range(2)]
    ledger.finish_rows(index for index, _ in first[0])
    ledger.begin_again()
    assert (ledger.ready, ledger.done) == (4, 0)
    assert [taken_with_updates(ledger) for _ in range(3)] == [*first, []]


def taken_with_updates(ledger, replica_group=0, budget=100):
    return [(index, ledger.mini_batch(index)) for index in ledger.take_window(replica_group, budget)]


def test_mini_batches_follow_the_order_of_training_and_no_window_crosses_their_border():
    ledger = ledger_of(4, updates=2)
    for index in (3, 0, 2):
        ledger.add_ready(index, TOKENS)
    assert taken_with_updates(ledger) == [(3, 0), (0, 0)]
    assert taken_with_updates(ledger) == [(2, 1)]
    ledger.add_ready(1, TOKENS)
    assert taken_with_updates(ledger) == [(1, 1)]
    ledger = ledger_of(4, order="prompt_order", updates=2)
    for index in (3, 2, 1):
        ledger.add_ready(index, TOKENS)
        assert taken_with_updates(ledger) == []
    ledger.add_ready(0, TOKENS)
    assert taken_with_updates(ledger) == [(0, 0), (1, 0)]
    assert taken_with_updates(ledger) == [(2, 1), (3, 1)]


@pytest.mark.parametrize(
    ("order", "windows"),
    [
        ("arrival", [[0], [1], [2], [3], [4], [5]]),
        ("prompt_order", [[0, 1], [2], [3, 4], [5]]),
    ],
)
def test_every_unit_has_a_part_of_each_mini_batch(order, windows):
    ledger = ledger_of(6, ready=range(6), order=order, replica_groups=2, updates=2)
    found = [taken_with_updates(ledger, number % 2) for number in range(len(windows))]
    assert found == [[(index, index // 3) for index in window] for window in windows]


def sizes(ledger, replica_groups, budget):
    """Number of groups of each window, for replica groups that ask in turn."""
    found = []
    while window := taken(ledger, len(found) % replica_groups, budget):
        found.append(len(window))
    return found


def arrived(count, expected, **keys):
    return ledger_of(expected, ready=range(count), **keys)  # five tokens each


def test_windows_get_smaller_towards_the_end_so_that_the_units_end_together():
    # the first may have 40 groups x 5 tokens / (2 x 2 replica groups) = 50 tokens, the second 30 x 5 / 4 = 37, ...
    assert sizes(arrived(40, 40, replica_groups=2), 2, 1000) == [10, 7, 5, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1]
    # the budget holds
    assert sizes(arrived(40, 40, replica_groups=2), 2, 30) == [6, 6, 6, 5, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1]
    assert sizes(arrived(40, 40, replica_groups=1), 1, 1000) == [40]  # nobody to wait for
    # rows of the next mini-batch are none of this one
    assert sizes(arrived(40, 80, replica_groups=2, updates=2), 2, 1000) == [10, 7, 5, 4, 3, 2, 2, *[1] * 7]
    assert sizes(arrived(40, 40, replica_groups=2, order="prompt_order"), 2, 1000) == [40]
    assert sizes(arrived(40, 40, replica_groups=2, least=20), 2, 1000) == [10, 7, 5, 4, 4, 4, 4, 2]


def test_under_a_pipeline_windows_are_the_fewest_equal_parts_of_the_units_shares():
    # 40 groups x 5 tokens are 100 tokens for each replica group
    assert sizes(arrived(40, 40, replica_groups=2, bubble=20), 2, 1000) == [20, 20]
    assert sizes(arrived(40, 40, replica_groups=2, bubble=20), 2, 60) == [10, 10, 10, 10]
    assert sizes(arrived(40, 40, replica_groups=2, bubble=20, updates=2), 2, 1000) == [10, 10, 10, 10]
    # smaller than the bubble, but in parallel
    assert sizes(arrived(4, 4, replica_groups=4, bubble=20), 4, 1000) == [1, 1, 1, 1]
    assert sizes(arrived(40, 40, replica_groups=1, bubble=20), 1, 1000) == [40]  # nobody to wait for
    assert sizes(arrived(10, 40, replica_groups=2, bubble=20), 2, 1000) == [10]  # nobody waits for a window to fill
    alone = arrived(40, 40, replica_groups=2, bubble=20)
    # the other one hangs: this replica group takes its share, and then of the other's at least the bubble, or a quarter
    assert [len(taken(alone, 0, 1000)) for _ in range(5)] == [20, 5, 4, 4, 4]


class Greedy(Ledger):
    """Full windows as long as there are groups."""

    def _largest(self, replica_group, budget, free, mini_batch):
        return budget


def ends(tokens, replica_groups, stages, micro_batch, rule=Ledger):
    """When the last replica group is through with groups that are all there, in the time of a token. A window of up to
    four micro-batches a stage also takes that of the bubble."""
    bubble = (stages - 1) * micro_batch
    ledger = rule(len(tokens), Windows(replica_groups=replica_groups, bubble=bubble))
    for index, size in enumerate(tokens):
        ledger.add_ready(index, size)
    free = [(0, replica_group) for replica_group in range(replica_groups)]
    last = 0
    while free:
        now, replica_group = heapq.heappop(free)
        if window := ledger.take_window(replica_group, 4 * stages * micro_batch):
            end = now + sum(tokens[index] for index in window) + bubble
            heapq.heappush(free, (end, replica_group))
            last = max(last, end)
            ledger.finish_rows(window)
    assert ledger.is_over
    return last


@pytest.mark.parametrize("replica_groups", [2, 4])
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("share", [50, 96, 150, 250])
def test_under_a_pipeline_the_units_end_after_their_share_and_one_bubble_a_window(replica_groups, stages, share):
    tokens = [2] * (share // 2 * replica_groups)
    windows = -(-share // (4 * stages * 10))
    best = share + windows * (stages - 1) * 10
    assert best <= ends(tokens, replica_groups, stages, 10) <= best + 2
    assert ends(tokens, replica_groups, stages, 10, rule=Greedy) >= best


def test_under_a_pipeline_no_step_ends_later_than_with_full_windows_but_for_a_group():
    draw = random.Random(0)
    shorter = 0
    for _ in range(300):
        replica_groups = draw.randint(2, 4)
        stages = draw.randint(2, 4)
        tokens = [draw.randint(1, 10) for _ in range(draw.randint(1, 120))]
        ours, full = (ends(tokens, replica_groups, stages, 20, rule=rule) for rule in (Ledger, Greedy))
        assert ours <= full + max(tokens), (replica_groups, stages, tokens)
        shorter += ours < full
    assert shorter > 200


def test_groups_that_have_not_come_in_count_with_the_mean_of_those_that_have():
    ledger = arrived(4, 40, replica_groups=2)
    assert taken(ledger, 0, 1000) == [0, 1, 2, 3]  # 200 tokens are to come: up to 50 are given
    ledger = arrived(4, 8, replica_groups=2)
    assert taken(ledger, 0, 1000) == [0, 1]  # 40: up to 10
    ledger.add_ready(4, TOKENS)
    assert taken(ledger, 1, 1000) == [2]  # 30: up to 7


@given(
    arrival=st.permutations(range(6)),
    hold=st.booleans(),
    budget=st.integers(1, 40),
    replica_groups=st.integers(1, 3),
    order=st.sampled_from(["arrival", "prompt_order"]),
    updates=st.sampled_from([2, 3, 6]),
    together=st.integers(1, 3),
)
def test_mini_batches_are_equally_large_and_given_in_their_order(
    arrival, hold, budget, replica_groups, order, updates, together
):
    ledger = ledger_of(6, order=order, hold=hold, replica_groups=replica_groups, updates=updates, together=together)
    by_update = [[] for _ in range(updates)]
    for index in arrival:
        ledger.add_ready(index, TOKENS)
        for _ in range(len(arrival) + 1):  # more would be rows given twice
            found = [
                (replica_group, window)
                for replica_group in range(replica_groups)
                if (window := ledger.take_window(replica_group, budget))
            ]
            for _, window in found:
                assert len({ledger.mini_batch(index) for index in window}) == 1
                by_update[ledger.mini_batch(window[0])] += window
                ledger.finish_rows(window)
    assert ledger.is_over
    expected = list(range(6)) if order == "prompt_order" else list(arrival)
    size = 6 // updates
    assert list(map(sorted, by_update)) == [sorted(expected[at : at + size]) for at in range(0, 6, size)]


@given(
    arrival=st.permutations(range(6)),
    hold=st.booleans(),
    budget=st.integers(1, 40),
    replica_groups=st.integers(1, 3),
    bubble=st.sampled_from([0, 7]),
    together=st.integers(1, 3),
)
def test_every_group_is_trained_once_and_prompt_order_ignores_arrival(
    arrival, hold, budget, replica_groups, bubble, together
):
    windows = {}
    for order in ("arrival", "prompt_order"):
        ledger = ledger_of(6, order=order, hold=hold, replica_groups=replica_groups, bubble=bubble, together=together)
        windows[order] = []
        for index in arrival:
            ledger.add_ready(index, TOKENS)
            for _ in range(len(arrival) + 1):
                found = [
                    (replica_group, window)
                    for replica_group in range(replica_groups)
                    if (window := taken(ledger, replica_group, budget))
                ]
                for _, window in found:
                    ledger.finish_rows(window)
                    windows[order].append(window)
            assert not found  # else rows are given again and again
        assert ledger.is_over
    assert sorted(sum(windows["arrival"], [])) == list(range(6))
    size = max(1, budget // 5)
    apart = [list(part) for one in windows["prompt_order"] for _, part in groupby(one, key=ledger.window)]
    assert sorted(apart) == [list(range(6))[at : at + size] for at in range(0, 6, size)]
    assert len(windows["prompt_order"]) == len(apart) or (bubble and together > 1)


@given(tokens=st.lists(st.integers(1, 30), min_size=1, max_size=40), together=st.integers(2, 5))
def test_windows_that_wait_already_are_given_as_one_and_make_the_same_micro_batches(tokens, together):
    ready = dict(enumerate(tokens))
    single, several = (Ledger(len(tokens) + 1, Windows(together=count)) for count in (1, together))
    for ledger in (single, several):
        for index, size in ready.items():
            ledger.add_ready(index, size)
    alone = list(iter(lambda: single.take_window(0, 10), []))
    found = list(iter(lambda: several.take_window(0, 10), []))
    packed = [list(pack_parts([Sized(index, ready[index]) for index in window], 10)) for window in found]
    assert [[part.index for part in row] for rows in packed for row in rows] == alone
    # the last one may grow still, and so is not waited for, nor joined to the others
    full = len(alone) - 1
    assert [len(rows) for rows in packed] == [together] * (full // together) + [full % together] * (
        full % together > 0
    ) + [1]


class Sized(NamedTuple):
    index: int
    size: int


def test_windows_given_as_one_are_of_one_mini_batch():
    ledger = ledger_of(12, ready=range(12), updates=2, together=4)
    assert [taken(ledger, budget=10) for _ in range(4)] == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]


def test_under_a_pipeline_all_windows_that_wait_are_given_as_one():
    ledger = ledger_of(10, ready=range(7), bubble=5, together=3)  # five tokens each
    assert [taken(ledger, budget=10) for _ in range(3)] == [[0, 1, 2, 3, 4, 5], [6], []]
    ledger = ledger_of(10, ready=range(5), bubble=5, together=3)
    assert taken(ledger, budget=10) == [0, 1, 2, 3, 4]  # else the last would fill and drain it once more


def test_under_a_pipeline_windows_in_prompt_order_are_given_as_one_and_stay_the_same():
    ledger = ledger_of(12, ready=[*range(5), 6, 7], order="prompt_order", bubble=5, together=4)
    assert [taken(ledger, budget=10) for _ in range(2)] == [[0, 1, 2, 3], []]  # 4 waits for 5
    for index in (5, 8, 9, 10, 11):
        ledger.add_ready(index, TOKENS)
    assert [taken(ledger, budget=10) for _ in range(2)] == [[4, 5, 6, 7, 8, 9, 10, 11], []]
    assert [ledger.window(index) for index in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    in_turn = ledger_of(8, ready=range(8), order="prompt_order", bubble=5, together=4, replica_groups=2, updates=2)
    assert [taken(in_turn, 1, 10) for _ in range(3)] == [[2, 3], [6, 7], []]  # of one mini-batch
    assert [taken(in_turn, 0, 10) for _ in range(3)] == [[0, 1], [4, 5], []]


def test_a_window_that_waits_alone_is_given_at_once():
    ledger = ledger_of(10, together=4)
    for index in range(3):
        assert ledger.take_window(0, 10) == []
        ledger.add_ready(index, TOKENS)
        assert ledger.take_window(0, 10) == [index]


def test_no_unit_gets_more_windows_as_one_than_its_share_of_what_waits():
    ledger = arrived(16, 1000, replica_groups=2, together=4)  # five tokens each: eight windows of ten tokens wait
    assert sizes(ledger, 2, 10) == [8, 4, 2, 2]
    assert sizes(arrived(16, 1000, replica_groups=4, together=4), 4, 10) == [4, 2, 2, 2, 2, 2, 2]
    # nor more than 1 / (4 · replica groups) of what none of them has: towards the end windows are those that they were
    assert sizes(arrived(40, 40, replica_groups=2, together=4), 2, 10) == [4, 4, 4, *[2] * 11, *[1] * 6]
    assert sizes(arrived(40, 40, replica_groups=2), 2, 10) == [*[2] * 17, *[1] * 6]
    ordered = {"order": "prompt_order", "replica_groups": 2}
    assert sizes(arrived(40, 40, together=4, **ordered), 2, 10) == sizes(arrived(40, 40, **ordered), 2, 10)


def test_a_unit_at_work_gets_a_window_ahead_only_while_windows_have_their_full_size():
    ledger = ledger_of(10, ready=range(10), replica_groups=2)  # five tokens each
    assert ledger.take_window(0, 10, ahead=True) == [0, 1]
    assert ledger.take_window(0, 10, ahead=True) == [2, 3]  # the 40 tokens left were two windows of each replica group
    assert ledger.take_window(0, 10, ahead=True) == []
    assert ledger.take_window(1, 10) == [4]
    assert ledger_of(1, ready=[0]).take_window(0, 10, ahead=True) == [0]  # nobody else would train it sooner
    ordered = ledger_of(2, ready=range(2), order="prompt_order", replica_groups=2)
    assert ordered.take_window(1, ONE, ahead=True) == [1]  # whose it is stands before
