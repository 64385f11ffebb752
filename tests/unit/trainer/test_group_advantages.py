"""Advantages of groups as they come from the orchestrator: of the group alone, or of the batch whose scores it
brings."""

from dataclasses import replace

import pytest
import torch

from engine.algorithm.advantages import ADVANTAGES
from engine.types import BatchScores, Group, Prompt, Score
from engine.wire.columns import batch_scores, open_group, pack_group
from support.policies import advantages_with, response

REWARDS = ((1.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.5, 0.0, 1.0))
LENGTHS = ((3, 1, 2), (2, 2, 4), (1, 5, 1))
OF_GROUP, OF_BATCH = ([name for name, one in ADVANTAGES.items() if one.scope == scope] for scope in ("group", "batch"))


def group_of(rewards, lengths, index=0):
    return Group(
        step=0,
        index=index,
        prompt=Prompt(f"p{index}", "", "", (1, 2)),
        responses=tuple(response([7] * length) for length in lengths),
        scores=tuple(map(Score, rewards)),
    )


def groups():
    """The batch of REWARDS and LENGTHS, in another order than that of its indices."""
    return [group_of(REWARDS[index], LENGTHS[index], index) for index in (2, 1, 0)]


@pytest.mark.parametrize("name", OF_BATCH)
def test_each_group_gets_its_row_of_the_batchs_advantages_also_over_the_wire(name):
    whole = ADVANTAGES[name](torch.tensor(REWARDS), torch.tensor(LENGTHS, dtype=torch.float32))
    scores = batch_scores(list(map(pack_group, groups())))
    assert scores == BatchScores(REWARDS, LENGTHS, LENGTHS)
    for group in groups():
        there = open_group(pack_group(group), scores)
        assert torch.equal(advantages_with(advantage=name).advantages(there), whole[group.index])


@pytest.mark.parametrize("name", OF_BATCH)
def test_the_batchs_advantages_are_of_rewards_less_the_penalty_of_long_responses(name):
    penalty = 0.5 * torch.tensor(((0.5, 0.0, 0.25), (0.25, 0.25, 0.75), (0.0, 1.0, 0.0)))  # from 2 to 5 of 5 tokens
    whole = ADVANTAGES[name](torch.tensor(REWARDS) - penalty, torch.tensor(LENGTHS, dtype=torch.float32))
    group_advantages = advantages_with(advantage=name, longest=5, overlong_buffer=4, overlong_penalty=0.5)
    for group in groups():
        there = replace(group, batch=BatchScores(REWARDS, LENGTHS, LENGTHS))
        assert group_advantages.advantages(there).tolist() == pytest.approx(whole[group.index].tolist(), abs=1e-6)


def with_excluded(group, numbers, value):
    """The group, these of its responses excluded; `value`: what they would have scored."""
    scores = [replace(s, value=value, excluded=True) if n in numbers else s for n, s in enumerate(group.scores)]
    return replace(group, scores=tuple(scores))


def without(group, numbers):
    """The group without these of its responses."""
    left = [number for number in range(len(group.responses)) if number not in numbers]
    return replace(
        group,
        responses=tuple(group.responses[number] for number in left),
        scores=tuple(group.scores[number] for number in left),
    )


GROUP = group_of((1.0, 0.0, 0.25, 1.0, 0.1, 1.0, 0.0, 0.7), (3, 1, 2, 5, 2, 2, 4, 1))


@pytest.mark.parametrize("name", OF_GROUP)
@pytest.mark.parametrize("numbers", [{0}, {7}, {2, 3}, {0, 1, 2, 3, 4, 5}])
@pytest.mark.parametrize("value", [0.0, 1e30])
def test_advantages_beside_excluded_responses_are_those_of_the_others_alone(name, numbers, value):
    group_advantages = advantages_with(advantage=name)
    found = group_advantages.advantages(with_excluded(GROUP, numbers, value))
    left = [number for number in range(8) if number not in numbers]
    assert torch.equal(found[left], group_advantages.advantages(without(GROUP, numbers)))
    assert not found[sorted(numbers)].any()


@pytest.mark.parametrize("name", OF_GROUP)
def test_a_group_of_which_too_few_are_left_has_no_gradient(name):
    group_advantages = advantages_with(advantage=name)
    for numbers in (range(8), range(1, 8)):
        group = with_excluded(GROUP, set(numbers), 0.5)
        assert group_advantages.advantages(group).tolist() == [0.0] * 8
        assert not group_advantages.unequal(group)


def test_an_excluded_response_has_no_weight_and_the_others_keep_theirs():
    group = with_excluded(GROUP, {2, 4}, 1.0)
    for number, one in enumerate(group.responses):
        whole = torch.full((len(one.token_ids),), 1 / len(one.token_ids))
        assert torch.equal(advantages_with().weights(group, number), whole * (number not in (2, 4)))
    assert advantages_with().count_tokens(group) == [3, 1, 0, 5, 0, 2, 4, 1]
    assert not any(advantages_with().count_tokens(with_excluded(GROUP, set(range(8)), 1.0)))


@pytest.mark.parametrize("name", OF_BATCH)
def test_an_excluded_response_moves_no_statistic_of_the_batch(name):
    """Whitened over the tokens of the others: as if it was not there, which a response without tokens is not."""
    batch = [replace(one, prompt=replace(one.prompt, id=f"p{one.index}")) for one in groups()]
    marked = [with_excluded(one, {1} if one.index == 2 else set(), 77.0) for one in batch]
    scores = batch_scores(list(map(pack_group, marked)))
    assert scores.values[2] == (0.5, None, 1.0)
    group_advantages = advantages_with(advantage=name)
    found = torch.stack(
        [group_advantages.advantages(replace(one, batch=scores)) for one in sorted(marked, key=lambda one: one.index)]
    )
    kept = [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.5, 1.0]]
    centred = [[r - sum(row) / len(row) for r in row] for row in kept] if name.endswith("baseline") else kept
    lengths = [[3, 1, 2], [2, 2, 4], [1, 1]]
    flat = [[r for row in centred for r in row], [n for row in lengths for n in row]]
    tokens = torch.tensor(flat[0]).double().repeat_interleave(torch.tensor(flat[1]))
    expected = [[(r - tokens.mean()) / (tokens.var() + 1e-8).sqrt() for r in row] for row in centred]
    assert found[:2].flatten().tolist() == pytest.approx([float(a) for row in expected[:2] for a in row], abs=1e-6)
    assert found[2].tolist() == pytest.approx([float(expected[2][0]), 0.0, float(expected[2][1])], abs=1e-6)


def test_groups_that_differ_by_the_penalty_of_long_responses_alone_are_unequal():
    group = group_of((1.0, 1.0), (2, 8))
    assert advantages_with(longest=8, overlong_buffer=4).unequal(group)
    assert not advantages_with(longest=8).unequal(group)
    shaped = replace(group, scores=(Score(0.0), Score(1.0)))  # equal once the penalty of 1 is taken off
    assert not advantages_with(longest=8, overlong_buffer=4).unequal(shaped)
