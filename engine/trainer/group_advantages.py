"""Shaped rewards and advantages of responses, and the loss weights of their tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithm.advantages import ADVANTAGES, Advantage
from engine.algorithm.shaping import are_equal, soft_overlong_penalty
from engine.config import Algorithm
from engine.errors import BadInput
from engine.run.user_algorithms import advantage_of, find_loss
from engine.run.user_code import UserCode, describe_error
from engine.trainer.ranks.packing import tensor_of
from engine.types import BatchScores, Group, is_left_out


@dataclass(frozen=True)
class GroupAdvantages:
    """How advantages and weights are computed. They depend on nothing but the group, so a group can be trained on
    arrival."""

    algorithm: Algorithm
    longest: int = 1
    """Length limit of a response, in tokens."""

    def rewards(self, group: Group) -> Tensor:
        """Return [G] fp32 rewards: the verifier's values, less the penalty for overlong responses."""
        values = torch.tensor([score.value for score in group.scores], dtype=torch.float32)
        return self._shaped(values, torch.tensor([len(one.token_ids) for one in group.responses], dtype=torch.float32))

    def _shaped(self, values: Tensor, lengths: Tensor) -> Tensor:
        """`lengths`: all tokens of the responses, since rollout.max_new_tokens counts those of tools, too."""
        buffer = self.algorithm.overlong_buffer
        if not buffer:
            return values
        return values + self.algorithm.overlong_penalty * soft_overlong_penalty(lengths, self.longest, buffer)

    def advantages(self, group: Group) -> Tensor:
        """Return [G] fp32 advantages, from the group's scores, or from those of the whole batch if the group carries
        them.

        Excluded responses get 0, and the advantages of the others are computed without them. If too few responses
        remain, all get 0. Raises BadInput if a user's advantage fails or returns anything but one finite number per
        response.
        """
        known = advantage_of(self.algorithm.advantage)
        if group.batch is not None:
            return self._of_batch(known, group.batch)[group.index]
        kept = _kept(group)
        found = torch.zeros(len(kept))
        if int(kept.sum()) >= max(1, known.least) or bool(kept.all()):
            found[kept] = self._of_group(
                known,
                group,
                self.rewards(group)[kept],
                torch.tensor(self.count_tokens(group), dtype=torch.float32)[kept],
            )
        return found

    def _of_batch(self, known: Advantage, batch: BatchScores) -> Tensor:
        """Return [B, G] advantages. The function sees an excluded response with no trained token and the mean reward of
        its group, so that it does not affect the statistics of the batch."""
        rows = [[math.nan if value is None else value for value in row] for row in batch.values]
        values = torch.tensor(rows, dtype=torch.float32)
        kept = ~values.isnan()
        rewards = self._shaped(values, torch.tensor(batch.lengths, dtype=torch.float32))
        means = rewards.double().nanmean(-1, keepdim=True).nan_to_num().float()
        return known(torch.where(kept, rewards, means), torch.tensor(batch.trained, dtype=torch.float32)) * kept

    def _of_group(self, known: Advantage, group: Group, rewards: Tensor, trained: Tensor) -> Tensor:
        if self.algorithm.advantage in ADVANTAGES:
            return known(rewards, trained)
        with UserCode() as attempt:
            return known(rewards, trained)
        assert attempt.error is not None
        raise BadInput(
            f'algorithm.advantage = "{self.algorithm.advantage}": it failed on step {group.step}, prompt '
            f"{group.prompt.id}, rewards {rewards.tolist()}: {describe_error(attempt.error)}"
        )

    def unequal(self, group: Group) -> bool:
        """Whether the group's shaped rewards differ by more than rounding; excluded responses do not count. A group
        with equal rewards contributes only the KL term."""
        return not are_equal(self.rewards(group)[_kept(group)].tolist())

    def mask(self, group: Group, number: int) -> Tensor:
        """Return [tokens] fp32 of the response at `number`: 1 for trained tokens, else 0. Whatever counts, averages or
        whitens tokens takes this mask, or `Row.trained`, which has its sums."""
        response = group.responses[number]
        if is_left_out(response.finish_reason, group.scores[number].excluded, self.algorithm.mask_truncated):
            return torch.zeros(len(response.token_ids))
        return tensor_of(response.loss_mask, torch.float32)

    def weights(self, group: Group, number: int) -> Tensor:
        """Return [tokens] fp32: each token's weight in the loss's sums (engine.algorithm.losses.Aggregation)."""
        mask = self.mask(group, number)
        return mask / mask.sum().clamp(min=1.0) if find_loss(self.algorithm.loss).aggregation == "response" else mask

    def count_tokens(self, group: Group) -> list[int]:
        """Return [G] numbers of trained tokens of the responses."""
        return [int(self.mask(group, number).sum()) for number in range(len(group.responses))]


def _kept(group: Group) -> Tensor:
    """Return [G] bool: which responses are not excluded."""
    return torch.tensor([not score.excluded for score in group.scores], dtype=torch.bool)
