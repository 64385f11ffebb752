"""Shaped rewards and advantages of responses, and the weights of their tokens in the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithm.advantages import ADVANTAGES
from engine.algorithm.shaping import overlong
from engine.config import Config
from engine.errors import BadInput
from engine.run.user_algorithms import advantage_of, loss_of
from engine.run.user_code import UserCode, describe
from engine.types import Group, Response


@dataclass(frozen=True)
class Credit:
    """How advantages and weights are computed. All they need comes with a group, so it can be trained on arrival."""

    advantage: str = "grpo"
    loss: str = "grpo"
    longest: int = 1
    """Length limit of a response."""
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    mask_truncated: bool = False

    @staticmethod
    def of(config: Config) -> Credit:
        """Return the settings of a config."""
        algorithm = config.algorithm
        return Credit(
            advantage=algorithm.advantage,
            loss=algorithm.loss,
            longest=config.rollout.max_new_tokens,
            overlong_buffer=algorithm.overlong_buffer,
            overlong_penalty=algorithm.overlong_penalty,
            mask_truncated=algorithm.mask_truncated,
        )

    def rewards(self, group: Group) -> Tensor:
        """Return [G] fp32 rewards: the verifier's values, less the penalty of responses that are too long."""
        return self._shaped(torch.tensor([score.value for score in group.scores], dtype=torch.float32), _lengths(group))

    def _shaped(self, values: Tensor, lengths: Tensor) -> Tensor:
        if not self.overlong_buffer:
            return values
        return values + self.overlong_penalty * overlong(lengths, self.longest, self.overlong_buffer)

    def advantages(self, group: Group) -> Tensor:
        """Return [G] fp32 advantages, from the group's scores, or from the whole batch's where the group carries these.

        Raises BadInput if a user's advantage fails or returns anything but one finite number per response.
        """
        if group.advantages is not None:
            return torch.tensor(group.advantages, dtype=torch.float32)
        if group.batch is not None:
            values, lengths = (
                torch.tensor(rows, dtype=torch.float32) for rows in (group.batch.values, group.batch.lengths)
            )
            return advantage_of(self.advantage)(self._shaped(values, lengths), lengths)[group.index]
        known = advantage_of(self.advantage)
        rewards = self.rewards(group)
        if self.advantage in ADVANTAGES:
            return known(rewards, _lengths(group))
        with UserCode() as attempt:
            return known(rewards, _lengths(group))
        assert attempt.error is not None
        raise BadInput(
            f'algorithm.advantage = "{self.advantage}": it failed on step {group.step}, prompt {group.prompt.id}, '
            f"rewards {rewards.tolist()}: {describe(attempt.error)}"
        )

    def unequal(self, group: Group) -> bool:
        """Whether the group's shaped rewards differ. If not, it teaches nothing but the KL term."""
        rewards = self.rewards(group)
        return bool((rewards != rewards[0]).any())

    def mask(self, response: Response) -> Tensor:
        """Return [tokens] fp32: 1 where a token is trained, else 0."""
        if self.mask_truncated and response.truncated:
            return torch.zeros(len(response.token_ids))
        return torch.tensor(response.loss_mask, dtype=torch.float32)

    def weights(self, response: Response) -> Tensor:
        """Return [tokens] fp32: each token's weight in the loss's sums (engine.algorithm.losses.Aggregation)."""
        mask = self.mask(response)
        return mask / mask.sum().clamp(min=1.0) if loss_of(self.loss).aggregation == "response" else mask

    def tokens(self, group: Group) -> int:
        """Return how many response tokens of the group are trained."""
        return int(sum(self.mask(response).sum() for response in group.responses))


def _lengths(group: Group) -> Tensor:
    return torch.tensor([len(response.token_ids) for response in group.responses], dtype=torch.float32)
