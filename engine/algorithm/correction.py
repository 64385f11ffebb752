"""Weights that correct for tokens to which the trainer's old policy and the instance give different probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.algorithm.ratios import ratio_of


def correction(log_ratio: Tensor, kind: str, limit: float) -> Tensor:
    """[T] weights of the tokens' gains, without gradient, from w = π_old / π_rollout.

    `log_ratio`: [T] log w of each token, or of its response at each of its tokens (`Terms.of_response`).

    "truncate": min(w, limit) (truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training", eq. 4). "mask": w where 1/limit ≤ w ≤ limit, else 0 (masked importance sampling:
    what is outside is dropped, not bounded). Raises ValueError for another `kind`.
    """
    ratio = ratio_of(log_ratio).detach()
    if kind == "truncate":
        return ratio.clamp(max=limit)
    if kind == "mask":
        return torch.where(_inside(ratio, limit), ratio, torch.zeros_like(ratio))
    raise ValueError(f'mismatch correction "{kind}" is unknown, expected "truncate" or "mask"')


def rejection(log_ratio: Tensor, limit: float) -> Tensor:
    """[T] 1 where 1/limit ≤ w ≤ limit, else 0, without gradient; `log_ratio` as of `correction`."""
    ratio = ratio_of(log_ratio).detach()
    return torch.where(_inside(ratio, limit), torch.ones_like(ratio), torch.zeros_like(ratio))


def _inside(ratio: Tensor, limit: float) -> Tensor:
    return (ratio >= 1 / limit) & (ratio <= limit)
