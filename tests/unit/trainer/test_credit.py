"""Advantages of groups as they come from the launcher: of the group alone, or of the batch whose scores it brings."""

from dataclasses import replace

import pytest
import torch

from engine.algorithm.advantages import ADVANTAGES
from engine.trainer.credit import Credit
from engine.types import BatchScores, Group, Prompt, Score
from engine.wire.sealed import batch_scores, open_group, seal_group
from support.policies import response

REWARDS = ((1.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.5, 0.0, 1.0))
LENGTHS = ((3, 1, 2), (2, 2, 4), (1, 5, 1))


def groups():
    """The batch of REWARDS and LENGTHS, in another order than that of its indices."""
    made = []
    for index, (rewards, lengths) in enumerate(zip(REWARDS, LENGTHS, strict=True)):
        made.append(
            Group(
                step=0,
                index=index,
                prompt=Prompt(f"p{index}", "", "", (1, 2)),
                responses=tuple(response([7] * length) for length in lengths),
                scores=tuple(Score(value) for value in rewards),
            )
        )
    return made[::-1]


@pytest.mark.parametrize("name", [name for name, one in ADVANTAGES.items() if one.scope == "batch"])
def test_each_group_gets_its_row_of_the_batchs_advantages_also_over_the_wire(name):
    whole = ADVANTAGES[name](torch.tensor(REWARDS), torch.tensor(LENGTHS, dtype=torch.float32))
    scores = batch_scores(list(map(seal_group, groups())))
    assert scores == BatchScores(REWARDS, LENGTHS)
    for group in groups():
        there = open_group(seal_group(group), scores)
        assert torch.equal(Credit(advantage=name).advantages(there), whole[group.index])


def test_advantages_of_an_older_record_are_taken_as_they_are():
    old = replace(groups()[0], advantages=(0.25, -0.5, 0.25))
    assert Credit(advantage="grpo").advantages(old).tolist() == [0.25, -0.5, 0.25]
