"""What the losses of batch scope need to know of a step's whole batch before any of it is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-6
"""By which BAPO's share may miss its target: at ratio 1 and equal lengths it is exactly a half, but for rounding."""


@dataclass(frozen=True)
class BatchTokens:
    """The trained tokens of a step's batch, of all ranks, in any order."""

    log_ratios: Tensor
    """[T] log π − log π_old, the policy being the step's own."""
    advantages: Tensor
    """[T] the response's advantage at each of its tokens."""


@dataclass(frozen=True)
class BatchLossSettings:
    """Constants of the batch-scope losses (config: algorithm.m2po and algorithm.bapo)."""

    second_moment: float = 0.04
    share: float = 0.5
    low: tuple[float, float] = (0.6, 0.9)
    high: tuple[float, float] = (1.2, 3.0)
    step: float = 0.05


Statistics = Callable[[BatchTokens, BatchLossSettings], tuple[float, ...]]
"""Must not depend on the order of the tokens."""


def outward(log_ratios: Tensor, advantages: Tensor) -> Tensor:
    """[T] bool: tokens that the gradient moves on in the direction in which their ratio has moved (A > 0 and r > 1, or
    A < 0 and r < 1): those that PPO's clip can act on."""
    return log_ratios.sign() * advantages.sign() > 0  # the product of the values may be too small for a float


def second_moment_limit(tokens: BatchTokens, limits: BatchLossSettings) -> tuple[float]:
    """The largest (log r)² that an outward token may have so that the mean over those kept is at most τ (M2PO,
    Algorithm 1).

    Lies half-way between the last token kept and the first one masked, so that rounding can't move one over it; inf
    where all are kept. Of equal values all are kept or none, so the order of tokens decides nothing.
    """
    moments = tokens.log_ratios[outward(tokens.log_ratios, tokens.advantages)].double().square().sort().values
    means = moments.cumsum(0) / torch.arange(1, moments.numel() + 1, dtype=torch.float64)
    keep = int((means <= limits.second_moment).sum())  # running means of ascending values ascend
    if keep == moments.numel():
        return (math.inf,)
    masked = float(moments[keep])
    kept = moments[moments < masked]
    return ((float(kept[-1]) if kept.numel() else 0.0) / 2 + masked / 2,)


def balanced_bounds(tokens: BatchTokens, limits: BatchLossSettings) -> tuple[float, float]:
    """Bounds (c_low, c_high) of the ratio, from (a⁻, a⁺) up to (b⁻, b⁺), until tokens with A > 0 bring the target share
    of the clipped surrogate, P / (P + N) ≥ ρ0 (BAPO, eq. 8, Algorithm 1): first c_high rises, then c_low."""
    low = limits.low[0]
    high = limits.high[0]
    while positive_share(tokens, low, high) < limits.share - TOLERANCE:
        if high < limits.high[1]:
            high = min(high + limits.step, limits.high[1])
        elif low < limits.low[1]:
            low = min(low + limits.step, limits.low[1])
        else:
            break
    return low, high


def positive_share(tokens: BatchTokens, low: float, high: float) -> float:
    """P / (P + N): P = Σ over A > 0 of min(r, high) A, N = Σ over A < 0 of max(r, low) |A|; 1 where both are 0."""
    ratio = tokens.log_ratios.double().exp()
    advantages = tokens.advantages.double()
    gains = advantages * torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low))
    positive = float(gains.clamp(min=0).sum())
    whole = float(gains.abs().sum())
    return positive / whole if whole else 1.0
