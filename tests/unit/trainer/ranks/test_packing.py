"""Which rows a window becomes: on one rank, on replicas in lockstep, and on the ranks of context parallelism."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.trainer.ranks.packing import FILLER, Packing, join_windows
from support.policies import a_group

LENGTHS = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=5), min_size=1, max_size=4)


def window(lengths):
    return [a_group(tuple(each), index=index, seed=index, prompt=5) for index, each in enumerate(lengths)]


def members(rows):
    return [(group.index, number) for row in rows for group, number in row.members]


@given(LENGTHS, st.integers(1, 60), st.booleans())
def test_a_row_holds_responses_in_their_order_up_to_the_budget(lengths, budget, shared):
    groups = window(lengths)
    rows = Packing(budget, shared_prompt=shared).rows(groups)
    assert members(rows) == [(group.index, n) for group in groups for n in range(len(group.responses))]
    for row in rows:
        assert row.layout.size == sum(part.size for part in row.parts)
        assert row.layout.size <= budget or len(row.members) == 1
        assert row.layout.lengths == tuple(len(response.token_ids) for response in row.responses)
        assert row.layout.targets.tolist() == [token for one in row.responses for token in one.token_ids]
    assert Packing(budget, shared_prompt=shared).rows(groups[:1])[0].parts[0] == rows[0].parts[0]


@given(LENGTHS, st.integers(1, 60), st.integers(1, 4))
def test_replicas_in_lockstep_take_the_rows_in_turn_and_fill_up(lengths, budget, count):
    groups = window(lengths)
    whole = Packing(budget).rows(groups)
    shares = [Packing(budget, share=(number, count)).rows(groups) for number in range(count)]
    assert {len(share) for share in shares} == {-(-len(whole) // count)}
    taken = [share[turn] for turn in range(len(shares[0])) for share in shares]
    assert members(taken) == members(whole)
    for row in taken[len(whole) :]:
        assert (row.parts, row.layout.size, row.layout.targets.numel()) == ((FILLER,), 1, 0)


@given(LENGTHS, LENGTHS, st.integers(1, 60), st.integers(1, 3))
def test_windows_in_prompt_order_that_are_given_as_one_are_packed_each_by_itself(one, other, budget, count):
    packing = Packing(budget, share=(count - 1, count))
    first = window(one)
    second = [replace(group, window=1) for group in window(other)]
    apart = packing.rows(first) + packing.rows(second)
    joined = packing.rows(first + second)
    assert [row.parts for row in joined] == [row.parts for row in apart]


@given(LENGTHS, st.integers(1, 60), st.sampled_from([1, 2, 4]))
def test_context_ranks_have_each_token_once_and_what_is_joined_follows_them(lengths, budget, size):
    groups = window(lengths)
    shards = [Packing(budget, multiple=8, context=(rank, size)).rows(groups) for rank in range(size)]
    for parts in zip(*shards, strict=True):
        count = sum(parts[0].layout.lengths)
        places = [part.joined(torch.arange(count).split(list(part.layout.lengths)), torch.long) for part in parts]
        assert torch.equal(torch.cat(places).sort().values, torch.arange(count))
        for part, place in zip(parts, places, strict=True):
            assert torch.equal(part.layout.kept, place)


def test_a_group_that_is_split_has_its_prompt_in_each_row():
    group = replace(a_group((4, 4, 4), prompt=5), index=3)
    rows = Packing(10).rows([group])
    assert [[part.numbers for part in row.parts] for row in rows] == [[(0,)], [(1,)], [(2,)]]
    assert all(row.layout.token_ids[:5].tolist() == list(group.prompt.token_ids) for row in rows)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 20))
def test_windows_are_joined_in_order_as_far_as_the_limit_goes(sizes, most):
    windows = [[(number, part) for part in range(size)] for number, size in enumerate(sizes)]
    joined = join_windows(windows, most)
    assert [one for each in joined for one in each] == [one for each in windows for one in each]
    assert all(len(each) <= most or len({number for number, _ in each}) == 1 for each in joined)
    for one, other in zip(joined, joined[1:], strict=False):  # no two that would go together are apart
        assert len(one) + sizes[other[0][0]] > most
    assert [len(window) for window in windows] == sizes
