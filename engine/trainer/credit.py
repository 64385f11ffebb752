"""What each response, and each of its tokens, counts in the step: shaped rewards, advantages, weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.algorithm.advantages import ADVANTAGES
from engine.algorithm.shaping import overlong
from engine.config import Config
from engine.errors import BadInput
from engine.trainer.extensions import advantage_of, loss_of
from engine.types import Group, Response
from engine.user_code import UserCode, describe


@dataclass(frozen=True)
class Credit:
    """How groups are credited; a function of the group alone, so that it can be trained as soon as it is complete."""

    advantage: str = "grpo"
    loss: str = "grpo"
    longest: int = 1
    """Length limit of a response."""
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    mask_truncated: bool = False

    @staticmethod
    def of(config: Config) -> Credit:
        """As the config says."""
        algorithm = config.algorithm
        return Credit(
            algorithm.advantage, algorithm.loss, config.rollout.max_new_tokens, algorithm.overlong_buffer,
            algorithm.overlong_penalty, algorithm.mask_truncated,
        )  # fmt: skip

    def rewards(self, group: Group) -> Tensor:
        """[G] fp32 verifier's values, less what over-long responses are punished with."""
        values = torch.tensor([score.value for score in group.scores], dtype=torch.float32)
        if not self.overlong_buffer:
            return values
        return values + self.overlong_penalty * overlong(_lengths(group), self.longest, self.overlong_buffer)

    def advantages(self, group: Group) -> Tensor:
        """[G] fp32: the group's own, where it brings some, because they depend on the batch (`credited`).

        Raises BadInput where a user's advantage fails or gives something else than a finite number per response.
        """
        if group.advantages is not None:
            return torch.tensor(group.advantages, dtype=torch.float32)
        known, rewards = advantage_of(self.advantage), self.rewards(group)
        if self.advantage in ADVANTAGES:
            return known(rewards, _lengths(group))
        with UserCode() as attempt:
            return known(rewards, _lengths(group))
        assert attempt.error is not None
        raise BadInput(f'algorithm.advantage = "{self.advantage}": it failed on step {group.step}, prompt {group.prompt.id}, '
                       f"rewards {rewards.tolist()}: {describe(attempt.error)}")

    def unequal(self, group: Group) -> bool:
        """Whether the group's (shaped) rewards differ: else it teaches nothing."""
        rewards = self.rewards(group)
        return bool((rewards != rewards[0]).any())

    def mask(self, response: Response) -> Tensor:
        """[tokens] fp32, 1 where a token is trained."""
        if self.mask_truncated and response.truncated:
            return torch.zeros(len(response.token_ids))
        return torch.tensor(response.loss_mask, dtype=torch.float32)

    def weights(self, response: Response) -> Tensor:
        """[tokens] fp32: what each counts in the sums over tokens (engine.algorithm.losses.Aggregation)."""
        mask = self.mask(response)
        return mask / mask.sum().clamp(min=1.0) if loss_of(self.loss).aggregation == "response" else mask

    def tokens(self, group: Group) -> int:
        """Response tokens that are trained."""
        return int(sum(self.mask(response).sum() for response in group.responses))


def credited(config: Config, groups: Sequence[Group]) -> list[Group]:
    """A step's groups with advantages of scope "batch", which need all of them; in any order, with the same result."""
    credit = Credit.of(config)
    ordered = sorted(groups, key=lambda group: group.index)
    rewards, lengths = (torch.stack([of(group) for group in ordered]) for of in (credit.rewards, _lengths))
    rows = zip(ordered, advantage_of(credit.advantage)(rewards, lengths).tolist(), strict=True)
    by_index = {group.index: replace(group, advantages=tuple(row)) for group, row in rows}
    return [by_index[group.index] for group in groups]


def _lengths(group: Group) -> Tensor:
    return torch.tensor([len(response.token_ids) for response in group.responses], dtype=torch.float32)
