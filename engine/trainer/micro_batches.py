"""The trainer's micro-batches: packed rows (trainer/ranks/packing.py) with the values the loss needs for each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.trainer.group_advantages import GroupAdvantages
from engine.trainer.ranks.packing import PackedRow, Packing, tensor_of
from engine.types import Group
from engine.wire.columns import REFERENCE


@dataclass(frozen=True)
class MicroBatch(PackedRow):
    """The input of one forward and backward pass. Tensors are [T], over the response tokens that this rank scores."""

    rollout: Tensor
    """The instance's log-probabilities."""
    advantages: Tensor
    weights: Tensor
    """Each token's weight in the loss (`GroupAdvantages.weights`)."""
    response: Tensor
    """Index in `members` of each token's response."""
    sampled: Tensor
    """Whether the token was sampled. One that a rollout program appended has no log-probability to compare with."""
    behind: Tensor
    """Whether the token was sampled by weights older than the step's."""
    of_members: tuple[float, ...]
    """The advantage of each of `members`."""
    reference: Tensor | None = None
    """The reference's log-probabilities, if a separate stage has computed them for the whole window."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same micro-batch with its tensors on the device."""
        if device == self.layout.rows.device:
            return self
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, layout=self.layout.to(device), **moved)


class PackedWindows:
    """This replica's micro-batches of windows. Another thread may pack a window before it is trained. It packs on the
    host, because only the trainer's thread may use the device."""

    def __init__(self, packing: Packing) -> None:
        self._packing = replace(packing, device=torch.device("cpu"))
        self._device = packing.device
        self._packed: dict[tuple[int, ...], list[MicroBatch]] = {}
        """By the ids of the window's group objects, which the micro-batches keep alive."""

    def pack_window(self, window: Sequence[Group], group_advantages: GroupAdvantages) -> None:
        """Pack a window. Raises BadInput if a user's advantage fails."""
        self._packed[tuple(map(id, window))] = micro_batches(window, self._packing, group_advantages)

    def take_micro_batches(self, window: Sequence[Group], group_advantages: GroupAdvantages) -> list[MicroBatch]:
        """Return the micro-batches of a window on the device. Packs them first unless `pack_window` has."""
        key = tuple(map(id, window))
        if key not in self._packed:
            self.pack_window(window, group_advantages)
        return [batch.to(self._device) for batch in self._packed.pop(key)]


def micro_batches(window: Sequence[Group], packing: Packing, group_advantages: GroupAdvantages) -> list[MicroBatch]:
    """Return this replica's micro-batches of a window. Advantages are those of the whole group, even if the group is
    split.

    Raises BadInput if a user's advantage fails.
    """
    advantages = {group.index: group_advantages.advantages(group) for group in window}
    has_reference = all(REFERENCE in group.columns for group in window)
    return [_micro_batch(row, group_advantages, advantages, has_reference) for row in packing.rows(window)]


def _micro_batch(
    row: PackedRow, group_advantages: GroupAdvantages, advantages: Mapping[int, Tensor], has_reference: bool
) -> MicroBatch:
    """`advantages`: [G] of each group, by the group's index."""
    responses = row.responses
    lengths = [len(response.token_ids) for response in responses]
    own = [advantages[group.index][number] for group, number in row.members]
    return MicroBatch(
        parts=row.parts,
        layout=row.layout,
        rollout=row.joined(tensor_of(response.logprobs, torch.float32) for response in responses),
        advantages=row.joined(value.repeat(length) for value, length in zip(own, lengths, strict=True)),
        weights=row.joined(group_advantages.weights(group, number) for group, number in row.members),
        response=row.joined((torch.full((n,), i) for i, n in enumerate(lengths)), torch.long),
        sampled=row.joined((tensor_of(response.loss_mask, torch.bool) for response in responses), torch.bool),
        behind=row.joined((_sampled_by_older(group, number) for group, number in row.members), torch.bool),
        of_members=tuple(map(float, own)),
        reference=row.joined(_reference(row)) if has_reference else None,
    )


def _sampled_by_older(group: Group, number: int) -> Tensor:
    """Return [tokens of the response]: whether weights older than the step's sampled the token.

    `Response.versions` holds runs of (first token, version).
    """
    response = group.responses[number]
    older = torch.tensor([version < group.step for _, version in response.versions], dtype=torch.bool)
    starts = [first for first, _ in response.versions]
    return older.repeat_interleave(torch.tensor([*starts, len(response.token_ids)]).diff())


def _reference(row: PackedRow) -> Iterator[Tensor]:
    """Yield each response's part of its group's column, which concatenates the values of all responses."""
    for part in row.parts:
        if part.numbers:
            lengths = [len(response.token_ids) for response in part.group.responses]
            whole = tensor_of(part.group.columns[REFERENCE], torch.float32).split(lengths)
            yield from (whole[number] for number in part.numbers)


def trained_tokens(group: Group) -> int:
    """Return the prompt and response tokens of all responses, the papers' unit of throughput.

    The prompt counts once per response, even if it is computed once per group.
    """
    return sum(len(group.prompt.token_ids) + len(response.token_ids) for response in group.responses)
