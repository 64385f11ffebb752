"""KL estimates from log-probabilities of sampled tokens (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.algorithm.ratios import bounded_log

LARGEST_K3 = 10.0
"""Largest value of k3 in a loss, as in verl. Without it, a token at x = 29 would count 4e12, with an equally large
gradient. Above it, at x > 2.6 or x < −11, the token's gradient is 0."""


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token KL(π‖π_ref) estimate −x with x = log π_ref − log π: unbiased and noisy.

    As a term of a loss its gradient is that of log π, which is zero in expectation. So it reports the KL but does not
    reduce it.
    """
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token KL(π‖π_ref) estimate x²/2 with x = log π_ref − log π: biased, but on samples of π its expected gradient
    is that of the KL."""
    return (reference - logprobs).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token KL(π‖π_ref) estimate e^x − x − 1 with x = log π_ref − log π (Periodic Asynchrony eq. 6).

    Both arguments are [T]. The estimate is never negative, is 0 where the two are equal, and carries the gradient of
    `logprobs`. `expm1` preserves small values that e^x − 1 would lose to rounding. At most `LARGEST_K3`.
    """
    return unbounded_k3(logprobs, reference).clamp(max=LARGEST_K3)


def unbounded_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """k3 for reporting: without the loss's bound, but with the bound on the log-ratio."""
    x = bounded_log(reference - logprobs)
    return torch.expm1(x) - x


KL = {"k1": k1, "k2": k2, "k3": k3}
"""The estimators by name, as in `algorithm.kl_estimator`."""
