"""Packs a window's groups into rows of native length (not padded to a common length), one row per micro-batch.

The rows depend only on the groups, so order and time of arrival can't change them (docs/architecture.md, Asynchrony
changes no number). The trainer and the scorers pack in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.layout import Layout, make_layout, split_responses
from engine.types import Group, Prompt, Response
from engine.wire.columns import Numbers
from engine.wire.routes import ROUTES, open_routes


@dataclass(frozen=True)
class GroupPart:
    """Some responses of one group, computed together with their prompt in one row."""

    group: Group
    numbers: tuple[int, ...]
    """Indices of the responses in the group, ascending."""
    size: int
    """Tokens that a row computes for this part."""

    @property
    def responses(self) -> list[Response]:
        """The responses of this part."""
        return [self.group.responses[number] for number in self.numbers]


@dataclass(frozen=True)
class PackedRow:
    """The input of one forward pass."""

    parts: tuple[GroupPart, ...]
    layout: Layout
    """This rank's shard of the row."""

    @property
    def members(self) -> list[tuple[Group, int]]:
        """(group, number of the response in it) for each response, in the order of the row."""
        return [(part.group, number) for part in self.parts for number in part.numbers]

    @property
    def responses(self) -> list[Response]:
        """The responses, in the order of the row."""
        return [response for part in self.parts for response in part.responses]

    def joined(self, pieces: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """Concatenate pieces, [tokens] for each response, and return this rank's part [T] on the layout's device."""
        whole = torch.cat([torch.zeros(0, dtype=dtype), *pieces])
        own = whole if self.layout.shards == 1 else whole[self.layout.kept.cpu()]
        return own.to(self.layout.rows.device)


@dataclass(frozen=True)
class Packing:
    """How this rank turns groups into rows."""

    budget: int
    """Token budget of a row; a single response may exceed it."""
    shared_prompt: bool = True
    multiple: int = 1
    """Rows are padded to a multiple of this (engine.model.build.row_multiple)."""
    context: tuple[int, int] = (0, 1)
    """(rank, size) of context parallelism: this rank's part of each row."""
    share: tuple[int, int] = (0, 1)
    """(number of this replica, count) among the replicas that compute a window together."""
    device: torch.device = torch.device("cpu")

    def rows(self, window: Sequence[Group]) -> list[PackedRow]:
        """Return this replica's rows of a window. Several windows in prompt order that were given as one are packed
        each by itself, so that the rows do not depend on how many were.

        A group larger than the budget is split, and each part computes the prompt again. Replicas in lockstep take
        turns with the rows and all compute the same number: a replica that would have one row less gets FILLER.
        """
        apart = groupby(window, key=attrgetter("window"))
        return [row for _, groups in apart for row in self._rows(groups)]

    def _rows(self, groups: Iterable[Group]) -> list[PackedRow]:
        packed = list(pack_parts([part for group in groups for part in self._parts(group)], self.budget))
        number, count = self.share
        mine = packed[number::count]
        fillers = -(-len(packed) // count) - len(mine)
        return [self._packed(parts) for parts in mine] + [self._packed([FILLER])] * fillers

    def _parts(self, group: Group) -> Iterator[GroupPart]:
        prompt = len(group.prompt.token_ids)
        lengths = [len(response.token_ids) for response in group.responses]
        for numbers in split_responses(prompt, lengths, self.budget, self.shared_prompt):
            size = sum(lengths[i] for i in numbers) + prompt * (1 if self.shared_prompt else len(numbers))
            yield GroupPart(group, tuple(numbers), size)

    def _packed(self, parts: Sequence[GroupPart]) -> PackedRow:
        groups = [(part.group.prompt.token_ids, [one.token_ids for one in part.responses]) for part in parts]
        routed = all(ROUTES in part.group.columns for part in parts)
        return PackedRow(tuple(parts), self.layout(groups, list(map(_routes, parts)) if routed else ()))

    def layout(
        self,
        groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
        routes: Sequence[tuple[Tensor, list[Tensor]]] = (),
    ) -> Layout:
        """Return this rank's shard of the row with these (prompt, responses) token ids. `routes`: the experts of the
        same tokens, for all of them or for none."""
        ids = [
            (tensor_of(prompt, torch.long), [tensor_of(response, torch.long) for response in responses])
            for prompt, responses in groups
        ]
        row = make_layout(ids, self.shared_prompt, routes).aligned(self.multiple)
        rank, size = self.context
        return (row.shard(rank, size) if size > 1 else row).to(self.device)


def _routes(part: GroupPart) -> tuple[Tensor, list[Tensor]]:
    """Return the experts of the prompt's tokens and of each response's tokens, from the group's column."""
    group = part.group
    lengths = [len(response.token_ids) for response in group.responses]
    whole = torch.from_numpy(open_routes(group.columns[ROUTES]))
    prompt, *responses = whole.split([len(group.prompt.token_ids), *lengths])
    return prompt, [responses[number] for number in part.numbers]


FILLER = GroupPart(Group(step=-1, index=-1, prompt=Prompt("", "", "", (0,)), responses=(), scores=()), (), 1)
"""A part with one token and no response; it contributes nothing to training."""


class Sized(Protocol):
    """Anything that fills part of a row."""

    @property
    def size(self) -> int:
        """Number of tokens that a row computes for it."""


P = TypeVar("P", bound=Sized)


def pack_parts(parts: Sequence[P], budget: int) -> Iterator[list[P]]:
    """Yield the parts of each row, in order: as many as fit into the budget, but at least one."""
    packed: list[P] = []
    used = 0
    for part in parts:
        if packed and used + part.size > budget:
            yield packed
            packed = []
            used = 0
        packed.append(part)
        used += part.size
    if packed:
        yield packed


M = TypeVar("M")


def join_windows(windows: Iterable[Sequence[M]], most: int) -> list[list[M]]:
    """Return windows joined in order to lists of at most `most` micro-batches. A window that has more stays alone."""
    joined: list[list[M]] = []
    for window in windows:
        if joined and len(joined[-1]) + len(window) <= most:
            joined[-1].extend(window)
        else:
            joined.append([*window])
    return joined


def tensor_of(numbers: Sequence[Any] | NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return numbers as a tensor on the host. If they are an array or a view of one (`Numbers`), their buffer is
    copied, so no number of a response is rounded."""
    found = np.array(numbers.view if isinstance(numbers, Numbers) else numbers, order="C")
    if found.dtype == np.bool_:
        found = found.view(np.uint8) != 0  # a mask's byte may be any number, torch accepts only 0 and 1
    return torch.from_numpy(found).to(dtype)
