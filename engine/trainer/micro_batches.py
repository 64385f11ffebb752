"""From a window's groups to micro-batches: a pure function of them, so that asynchrony can't change it
(docs/architecture.md, Asynchrony changes no number)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.model.layout import Layout, layout, split
from engine.trainer.credit import Credit
from engine.types import Group, Response


@dataclass(frozen=True)
class Member:
    """A response in a micro-batch: whose it is, by its group's and its own number,
    and behind which prompt it stands."""

    group: int
    number: int
    prompt: tuple[int, ...]
    response: Response
    step: int
    """Its group's: the weight version that trains it."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward; per-token tensors are [T] over the response tokens that this rank scores."""

    members: tuple[Member, ...]
    layout: Layout
    rollout: Tensor
    """The instance's log-probabilities."""
    advantages: Tensor
    weights: Tensor
    """What each token counts (Credit.weights)."""
    response: Tensor
    """Which of `members` each token belongs to."""
    behind: Tensor
    """Whether weights before the step's own sampled the token."""


@dataclass(frozen=True)
class GroupPart:
    """Some responses of one group, with their advantages."""

    prompt: tuple[int, ...]
    members: tuple[Member, ...]
    advantages: Tensor
    size: int
    """Tokens computed."""


@dataclass(frozen=True)
class Packing:
    """How groups become micro-batches on this rank."""

    credit: Credit
    budget: int
    """Tokens of a micro-batch."""
    shared_prompt: bool = True
    multiple: int = 1
    """Rows are filled up to a multiple of this (engine.model.build.row_multiple)."""
    context: tuple[int, int] = (0, 1)
    """(rank, size) of context parallelism: which part of each row is this rank's."""
    share: tuple[int, int] = (0, 1)
    """(number, count) of the replicas that train a window together."""
    device: torch.device = torch.device("cpu")

    def micro_batches(self, window: Sequence[Group]) -> list[MicroBatch]:
        """This replica's micro-batches of a window; groups above the budget are split, their prompt computed again.

        Advantages are over the whole group, whatever the split. Replicas in lockstep are dealt one micro-batch in turn
        and all run equally many: who has no more gets one of a single token and no response.
        """
        packed = list(_packed([part for group in window for part in self._parts(group)], self.budget))
        number, count = self.share
        mine = packed[number::count]
        fillers = -(-len(packed) // count) - len(mine)
        return [self.micro_batch(parts) for parts in mine] + [self.micro_batch([FILLER])] * fillers

    def _parts(self, group: Group) -> Iterator[GroupPart]:
        advantages = self.credit.advantages(group)
        prompt = group.prompt.token_ids
        lengths = [len(response.token_ids) for response in group.responses]
        for indices in split(len(prompt), lengths, self.budget, self.shared_prompt):
            size = sum(lengths[i] for i in indices) + len(prompt) * (1 if self.shared_prompt else len(indices))
            members = tuple(
                Member(group=group.index, number=i, prompt=prompt, response=group.responses[i], step=group.step)
                for i in indices
            )
            yield GroupPart(prompt, members, advantages[indices], size)

    def micro_batch(self, parts: Sequence[GroupPart]) -> MicroBatch:
        """Parts as one row, and this rank's share of it."""
        members = tuple(member for part in parts for member in part.members)
        responses = [member.response for member in members]
        lengths = torch.tensor([len(response.token_ids) for response in responses], dtype=torch.long)
        row = self.row([(part.prompt, [member.response.token_ids for member in part.members]) for part in parts])
        columns: tuple[Tensor, ...] = (
            torch.tensor([value for response in responses for value in response.logprobs]),
            torch.repeat_interleave(torch.cat([part.advantages for part in parts]), lengths),
            torch.cat([self.credit.weights(response) for response in responses]) if responses else torch.zeros(0),
            torch.repeat_interleave(torch.arange(len(responses)), lengths),
            torch.tensor([behind for member in members for behind in _behind(member)], dtype=torch.bool),
        )
        if self.context[1] > 1:
            columns = tuple(column[row.kept.cpu()] for column in columns)
        return MicroBatch(members, row, *(column.to(self.device) for column in columns))

    def row(self, groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> Layout:
        """(prompt, responses) token ids as a row, and this rank's share of it."""
        row = layout(groups, self.shared_prompt).aligned(self.multiple)
        rank, size = self.context
        return (row.shard(rank, size) if size > 1 else row).to(self.device)


def _behind(member: Member) -> Iterator[bool]:
    """Of each token of the response (`Response.versions` holds runs of (first token, version))."""
    starts = [*member.response.versions, (len(member.response.token_ids), 0)]
    for (first, version), (end, _) in pairwise(starts):
        yield from [version < member.step] * (end - first)


FILLER = GroupPart((0,), (), torch.zeros(0), 1)
"""Computes one token and trains nothing."""


def _packed(parts: Sequence[GroupPart], budget: int) -> Iterator[list[GroupPart]]:
    packed: list[GroupPart] = []
    for part in parts:
        if packed and sum(other.size for other in packed) + part.size > budget:
            yield packed
            packed = []
        packed.append(part)
    if packed:
        yield packed


def trained_tokens(group: Group) -> int:
    """Prompt and response tokens of every response, whatever was computed: the papers' unit of throughput."""
    return sum(len(group.prompt.token_ids) + len(response.token_ids) for response in group.responses)
