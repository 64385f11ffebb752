"""KL estimates from log-probabilities of sampled tokens (Schulman, "Approximating KL divergence", 2020), ratios of two
probabilities of a token, and how much the log-probabilities of trainer and rollout instance differ
(docs/architecture.md, On-policy is checked)."""

from __future__ import annotations

import torch
from torch import Tensor

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


LARGEST_LOG = 20.0
"""Bound of |log ratio| before exponentiation, as in verl. e^20 is 4.9e8; e^89 overflows fp32, and if such a ratio were
clipped, its gradient would be 0 · inf, which is NaN."""


def bounded_log(log_ratio: Tensor) -> Tensor:
    """Return the log-ratio, limited to ±`LARGEST_LOG`. Within the bound, value and gradient keep their exact bits;
    outside, the gradient is 0. NaN stays NaN."""
    return log_ratio.clamp(-LARGEST_LOG, LARGEST_LOG)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return the ratio, between e^−20 and e^20."""
    return torch.exp(bounded_log(log_ratio))


def mismatch_figures(trainer: Tensor, rollout: Tensor) -> tuple[float, float]:
    """Return (max |ratio − 1|, sum of KL estimates) for log-probabilities [T] of trainer and rollout instance.

    The ratio is π_trainer / π_rollout. The KL is k3 of KL(rollout‖trainer), since the instance sampled the tokens.
    Computed in fp64, so that rounding does not hide differences of 1e-9, and on the host, since NPUs have no fp64.
    Log-ratios are bounded as in the loss (`bounded_log`). Empty input gives zeros; NaN anywhere gives NaN.
    """
    if trainer.numel() == 0:
        return 0.0, 0.0
    ours = trainer.cpu().double()
    theirs = rollout.cpu().double()
    return float(torch.expm1(bounded_log(ours - theirs)).abs().max()), float(unbounded_k3(theirs, ours).sum())
