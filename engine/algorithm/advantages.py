"""Advantages: how much better a response was than its peers."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6


def grpo(rewards: Tensor) -> Tensor:
    """Group-relative advantage A = (R − mean) / (std + 1e-6), sample standard deviation over the group.

    rewards [G] of one prompt, G ≥ 2 → [G]. Equal rewards give exactly 0. DeepSeekMath (GRPO) §4.1.2; Periodic
    Asynchrony uses it unchanged.
    """
    if rewards.numel() < 2:
        raise ValueError("grpo needs a group of at least 2 responses: one has no spread")
    centred = rewards - rewards.mean()
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)  # the mean of equal values may be off by a rounding
    return centred / (rewards.std(unbiased=True) + EPSILON)


ADVANTAGES = {"grpo": grpo}
"""By the name in `algorithm.advantage`."""
