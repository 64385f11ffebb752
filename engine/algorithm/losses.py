"""The policy loss of a micro-batch, as a sum that the step's own denominator divides at its end.

All terms (surrogate, KL, entropy) share one aggregation: mean over the tokens of a response, sum over responses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithm.kl import k3


@dataclass(frozen=True)
class Terms:
    """What the loss needs of a micro-batch of T response tokens; all tensors are [T]."""

    logprobs: Tensor
    """Policy, with gradient."""
    old: Tensor
    """Old policy, detached."""
    reference: Tensor | None
    """Reference, detached; None when kl_coef is 0."""
    entropy: Tensor
    """Of the policy's distributions, nats."""
    advantages: Tensor
    """The response's advantage at each of its tokens."""
    weights: Tensor
    """1/|o_i| at the trained tokens of response i, 0 at masked ones: sums over tokens are sums of response means."""


@dataclass(frozen=True)
class Coefficients:
    """Of the loss."""

    clip_low: float
    clip_high: float
    kl: float
    entropy: float


@dataclass(frozen=True)
class Loss:
    """Sums over the micro-batch's responses of per-response means; divide by N·G. Only `total` carries a gradient."""

    total: Tensor
    kl: Tensor
    entropy: Tensor
    clipped: Tensor
    """Share of tokens where the clip is active (the minimum picks the clipped branch)."""


def grpo(terms: Terms, coefficients: Coefficients) -> Loss:
    """Loss = −J of Periodic Asynchrony eq. 4–9, with token ratios and the mean over |o_i| (as implementations read it).

    J_i = mean_t [ min(r A, clip(r, 1 − ε_low, 1 + ε_high) A) − β k3 + c H ], r = exp(log π − log π_old).
    """
    ratio = torch.exp(terms.logprobs - terms.old)
    clip = ratio.clamp(1.0 - coefficients.clip_low, 1.0 + coefficients.clip_high)
    plain, bounded = ratio * terms.advantages, clip * terms.advantages
    gain = torch.minimum(plain, bounded)
    weights = terms.weights
    entropy = (terms.entropy * weights).sum()
    objective = (gain * weights).sum()
    kl = torch.zeros((), dtype=gain.dtype)
    if terms.reference is not None:
        kl = (k3(terms.logprobs, terms.reference) * weights).sum()
        objective = objective - coefficients.kl * kl
    if coefficients.entropy:
        objective = objective + coefficients.entropy * entropy
    clipped = ((bounded < plain).to(weights.dtype) * weights).sum()
    return Loss(-objective, kl.detach(), entropy.detach(), clipped.detach())


LOSSES = {"grpo": grpo}
"""By the name in `algorithm.loss`."""
