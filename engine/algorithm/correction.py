"""Weights for tokens that the instance sampled with another probability than the trainer gives them."""

from __future__ import annotations

import torch
from torch import Tensor


def correction(sampled: Tensor, rollout: Tensor, kind: str, limit: float) -> Tensor:
    """[T] weights w = π_trainer / π_rollout of the tokens' gains, both under the weights that sampled; without
    gradient.

    `sampled`, `rollout`: log-probabilities [T] of the trainer and of the engine. w corrects for the engine's numerics
    alone; what the policy has moved since is the business of the ratio π / π_old.

    "truncate": min(w, limit) (truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training", eq. 4). "mask": w where 1/limit ≤ w ≤ limit, else 0 (masked importance sampling:
    a token outside is dropped, not bounded).
    """
    ratio = torch.exp(sampled - rollout).detach()
    if kind == "truncate":
        return ratio.clamp(max=limit)
    if kind == "mask":
        return torch.where((ratio >= 1 / limit) & (ratio <= limit), ratio, torch.zeros_like(ratio))
    raise ValueError(f'mismatch correction "{kind}" is unknown, expected "truncate" or "mask"')
