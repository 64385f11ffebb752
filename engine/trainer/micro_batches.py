"""Packing a window's groups into micro-batches. They are a function of the groups alone, so the order and time of
arrival can't change them (docs/architecture.md, Asynchrony changes no number)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.model.layout import Layout, layout, split
from engine.trainer.credit import Credit
from engine.types import Group, Response


@dataclass(frozen=True)
class Member:
    """A response in a micro-batch."""

    group: int
    """Index of its group in the step."""
    number: int
    """Its own number in the group."""
    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    response: Response
    step: int
    """The step, and so the weight version, that trains it."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass computes. Tensors are [T], over the response tokens that this rank scores."""

    members: tuple[Member, ...]
    layout: Layout
    rollout: Tensor
    """The instance's log-probabilities."""
    advantages: Tensor
    weights: Tensor
    """Each token's weight in the loss (`Credit.weights`)."""
    response: Tensor
    """Index in `members` of each token's response."""
    behind: Tensor
    """Whether weights older than the step's own sampled the token."""


@dataclass(frozen=True)
class GroupPart:
    """Some responses of one group, with their advantages."""

    prompt: tuple[int, ...]
    members: tuple[Member, ...]
    advantages: Tensor
    size: int
    """Tokens that a row computes for it."""


@dataclass(frozen=True)
class Packing:
    """How groups become micro-batches on this rank."""

    credit: Credit
    budget: int
    """Token budget of a micro-batch; a single response may exceed it."""
    shared_prompt: bool = True
    multiple: int = 1
    """Rows are filled up to a multiple of this (engine.model.build.row_multiple)."""
    context: tuple[int, int] = (0, 1)
    """(rank, size) of context parallelism: this rank's part of each row."""
    share: tuple[int, int] = (0, 1)
    """(number of this replica, count) among the replicas that train a window together."""
    device: torch.device = torch.device("cpu")

    def micro_batches(self, window: Sequence[Group]) -> list[MicroBatch]:
        """Return this replica's micro-batches of a window.

        A group above the budget is split, and each part computes the prompt again; its advantages are those of the
        whole group. Replicas in lockstep take the micro-batches in turn and all run equally many: a replica that would
        have one less gets FILLER.
        """
        packed = list(pack_parts([part for group in window for part in self._parts(group)], self.budget))
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
        """Return parts as one row, of which this rank gets its share."""
        members = tuple(member for part in parts for member in part.members)
        responses = [member.response for member in members]
        lengths = torch.tensor([len(response.token_ids) for response in responses], dtype=torch.long)
        row = self.row([(part.prompt, [member.response.token_ids for member in part.members]) for part in parts])
        columns: tuple[Tensor, ...] = (
            torch.tensor([value for response in responses for value in response.logprobs]),
            torch.repeat_interleave(torch.cat([part.advantages for part in parts]), lengths),
            torch.cat([self.credit.weights(response) for response in responses]) if responses else torch.zeros(0),
            torch.repeat_interleave(torch.arange(len(responses)), lengths),
            torch.tensor([behind for member in members for behind in _sampled_by_older(member)], dtype=torch.bool),
        )
        if self.context[1] > 1:
            columns = tuple(column[row.kept.cpu()] for column in columns)
        return MicroBatch(members, row, *(column.to(self.device) for column in columns))

    def row(self, groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> Layout:
        """Return this rank's share of the row that holds these (prompt, responses) token ids."""
        row = layout(groups, self.shared_prompt).aligned(self.multiple)
        rank, size = self.context
        return (row.shard(rank, size) if size > 1 else row).to(self.device)


def _sampled_by_older(member: Member) -> Iterator[bool]:
    """Yield for each token of the response whether weights older than the step's own sampled it.

    `Response.versions` holds runs of (first token, version).
    """
    starts = [*member.response.versions, (len(member.response.token_ids), 0)]
    for (first, version), (end, _) in pairwise(starts):
        yield from [version < member.step] * (end - first)


FILLER = GroupPart((0,), (), torch.zeros(0), 1)
"""A part of one token without a response: it trains nothing."""


class Sized(Protocol):
    """Something that fills a part of a row."""

    @property
    def size(self) -> int:
        """Tokens that a row computes for it."""


Part = TypeVar("Part", bound=Sized)


def pack_parts(parts: Sequence[Part], budget: int) -> Iterator[list[Part]]:
    """Yield the parts of each micro-batch, in their order: as many as fit into the budget, at least one."""
    packed: list[Part] = []
    for part in parts:
        if packed and sum(other.size for other in packed) + part.size > budget:
            yield packed
            packed = []
        packed.append(part)
    if packed:
        yield packed


def trained_tokens(group: Group) -> int:
    """Return the prompt and response tokens of all responses, the papers' unit of throughput.

    The prompt counts once per response, even if it is computed once per group.
    """
    return sum(len(group.prompt.token_ids) + len(response.token_ids) for response in group.responses)
