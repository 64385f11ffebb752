"""Weights that correct for tokens to which trainer and instance give different probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def correction(sampled: Tensor, rollout: Tensor, kind: str, limit: float) -> Tensor:
    """[T] weights of the tokens' gains, without gradient, from w = π_trainer / π_rollout, both under the weights that
    sampled.

    `sampled`, `rollout`: log-probabilities [T] of the trainer and of the engine. w corrects for the engine's numerics
    only; how far the policy has moved since is corrected by the ratio π / π_old.

    "truncate": min(w, limit) (truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training", eq. 4). "mask": w where 1/limit ≤ w ≤ limit, else 0 (masked importance sampling:
    a token outside is dropped, not bounded). Raises ValueError for another `kind`.
    """
    ratio = torch.exp(sampled - rollout).detach()
    if kind == "truncate":
        return ratio.clamp(max=limit)
    if kind == "mask":
        return torch.where((ratio >= 1 / limit) & (ratio <= limit), ratio, torch.zeros_like(ratio))
    raise ValueError(f'mismatch correction "{kind}" is unknown, expected "truncate" or "mask"')
