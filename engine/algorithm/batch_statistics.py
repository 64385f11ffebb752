"""Statistics of a step's whole batch, which losses of batch scope need before the first backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from engine.algorithm.kl import ratio_of

TOLERANCE = 1e-6
"""How far BAPO's share may be below its target. At ratio 1 and equal lengths the share is exactly a half, up to
rounding."""
STEP = 0.05
"""Amount by which a bound of BAPO rises at a time."""


@dataclass(frozen=True)
class BatchTokens:
    """The trained tokens of a step's batch, from all ranks, in any order."""

    log_ratios: Tensor
    """[T] log π − log π_old, with π the policy at the start of the step."""
    advantages: Tensor
    """[T] each token's advantage, which is its response's."""


class Coefficients(Protocol):
    """Keys of the table `algorithm` that a loss and its statistics may read (docs/configuration.md). A loss reads none
    that has no effect on it."""

    clip_low: float
    clip_high: float
    dual_clip: float
    kl_coef: float
    entropy_coef: float
    mismatch_limit: float
    mismatch_reject_limit: float
    kl_estimator: Literal["k1", "k2", "k3"]
    mismatch: Literal["none", "truncate", "mask"]
    mismatch_level: Literal["token", "sequence"]
    mismatch_reject: Literal["none", "token", "sequence", "geometric"]
    m2po: Any
    """The table `algorithm.m2po`."""
    bapo: Any
    """The table `algorithm.bapo`."""


Statistics = Callable[[BatchTokens, Coefficients], tuple[float, ...]]
"""Numbers about the whole batch that a loss needs. They must not depend on the order of the tokens."""


def outward_mask(log_ratios: Tensor, advantages: Tensor) -> Tensor:
    """[T] bool: whether the gradient moves a token's ratio further in the direction in which it has already moved (A >
    0 and r > 1, or A < 0 and r < 1). PPO's clip can only act on these tokens."""
    return log_ratios.sign() * advantages.sign() > 0  # the product of the values may be too small for a float


def second_moment_limit(tokens: BatchTokens, coefficients: Coefficients) -> tuple[float]:
    """(limit,): outward tokens with a larger (log r)² are masked, so that its mean is at most τ.

    The mean is over the tokens kept (M2PO, Algorithm 1). The authors' release (Infini-AI-Lab/M2PO, core_algos.py) takes
    it over all outward tokens, with values capped at the largest kept one, and so masks more. The limit is half-way
    between the last token kept and the first one masked, so that rounding can't move a token across it; inf if all are
    kept. Tokens with equal values are all kept or all masked, so their order does not matter.
    """
    moments = tokens.log_ratios[outward_mask(tokens.log_ratios, tokens.advantages)].double().square().sort().values
    total = moments.cumsum(0)
    number = torch.arange(1, moments.numel() + 1, dtype=torch.float64)
    means = total / number
    if not bool((means[-1:] > coefficients.m2po.threshold).any()):
        return (math.inf,)
    keep = int((means <= coefficients.m2po.threshold).sum())  # running means of ascending values ascend
    masked = float(moments[keep])
    kept = moments[moments < masked]
    return ((float(kept[-1]) if kept.numel() else 0.0) / 2 + masked / 2,)


def balanced_bounds(tokens: BatchTokens, coefficients: Coefficients) -> tuple[float, float]:
    """Bounds (c_low, c_high) of the ratio at which tokens with A > 0 contribute the target share of the clipped
    surrogate, P / (P + N) ≥ ρ0 (BAPO, eq. 8, Algorithm 1).

    They start at (a⁻, a⁺) and rise to at most (b⁻, b⁺), first c_high, then c_low. If both limits are reached, the share
    stays below the target.
    """
    limits = coefficients.bapo
    low = limits.low[0]
    high = limits.high[0]
    while positive_share(tokens, low, high) < limits.share - TOLERANCE:
        if high < limits.high[1]:
            high = min(high + STEP, limits.high[1])
        elif low < limits.low[1]:
            low = min(low + STEP, limits.low[1])
        else:
            break
    return low, high


def positive_share(tokens: BatchTokens, low: float, high: float) -> float:
    """P / (P + N): P = Σ over A > 0 of min(r, high) A, N = Σ over A < 0 of max(r, low) |A|; 1 if both are 0."""
    ratio = ratio_of(tokens.log_ratios.double())
    advantages = tokens.advantages.double()
    gains = advantages * torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low))
    positive = float(gains.clamp(min=0).sum())
    whole = float(gains.abs().sum())
    return positive / whole if whole else 1.0
