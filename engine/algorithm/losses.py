"""The policy loss of a micro-batch, as a sum that the step's own denominator divides at its end.

All terms (surrogate, KL, entropy) share one aggregation. A new loss is a function with a decorator that gives each
token's gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from engine.algorithm.batch_statistics import (
    BatchLossSettings,
    Statistics,
    balanced_bounds,
    outward,
    second_moment_limit,
)
from engine.algorithm.correction import correction
from engine.algorithm.kl import KL

Aggregation = Literal["response", "token", "constant"]
"""The mean over each response's tokens, then over responses; the mean over all tokens of the step; the sum over tokens
divided by responses times the length limit."""


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
    """What each token counts: 0 where it is masked, else 1/|o_i| (aggregation "response") or 1."""
    rollout: Tensor
    """The instance's log-probabilities."""
    response: Tensor
    """int64: number of the token's response in the micro-batch."""
    responses: int
    """R, those of the micro-batch: the same on all context-parallel ranks,
    also on one that holds no token of some of them."""
    whole: Callable[[Tensor], Tensor] = lambda sums: sums
    """Sums over responses' tokens [R] on this rank → over all context-parallel ranks, without gradient.
    A collective of these."""
    statistics: tuple[float, ...] = ()
    """What the loss's `statistics` found over the whole batch; () for a loss of group scope."""
    sampled: Tensor | None = None
    """The trainer's log-probabilities under the weights that sampled, detached; None: on-policy, the policy's own."""

    @property
    def ratio(self) -> Tensor:
        """Token ratios π / π_old, with gradient."""
        return torch.exp(self.logprobs - self.old)


@dataclass(frozen=True)
class Coefficients:
    """Of the loss."""

    clip_low: float
    clip_high: float
    kl: float
    entropy: float
    kl_estimator: str = "k3"
    mismatch: str = "none"
    """How the gains are corrected for tokens that the instance sampled with another
    probability ("truncate", "mask")."""
    mismatch_limit: float = 2.0
    limits: BatchLossSettings = field(default_factory=BatchLossSettings)
    """Of the losses of batch scope."""


@dataclass(frozen=True)
class Loss:
    """Weighted sums over the micro-batch's tokens; the step divides them. Only `total` carries a gradient."""

    total: Tensor
    kl: Tensor
    entropy: Tensor
    clipped: Tensor
    """Of the tokens whose gain no longer depends on the policy because of the clip."""


Gain = Callable[[Terms, Coefficients], tuple[Tensor, Tensor]]
"""→ ([T] gain of each token, with gradient; [T] bool, where the clip is active)."""


@dataclass(frozen=True)
class PolicyLoss:
    """A loss −Σ weight · (gain − β·KL + c·entropy)."""

    gain: Gain
    aggregation: Aggregation = "response"
    statistics: Statistics | None = None
    """Computed over the trained tokens of the step's whole batch before the first backward pass,
    and given to `gain`."""

    @property
    def scope(self) -> Literal["group", "batch"]:
        """ "batch" where statistics are over the step's batch:
        refused in `periodic`, where groups are trained as they come."""
        return "batch" if self.statistics is not None else "group"

    def __call__(self, terms: Terms, coefficients: Coefficients) -> Loss:
        """The micro-batch's sums."""
        gain, clipped = self.gain(terms, coefficients)
        if coefficients.mismatch != "none":
            sampled = terms.logprobs.detach() if terms.sampled is None else terms.sampled
            gain = gain * correction(sampled, terms.rollout, coefficients.mismatch, coefficients.mismatch_limit)
        weights = terms.weights
        entropy = (terms.entropy * weights).sum()
        objective = (gain * weights).sum()
        kl = torch.zeros((), dtype=gain.dtype)
        if terms.reference is not None:
            kl = (KL[coefficients.kl_estimator](terms.logprobs, terms.reference) * weights).sum()
            objective = objective - coefficients.kl * kl
        if coefficients.entropy:
            objective = objective + coefficients.entropy * entropy
        return Loss(-objective, kl.detach(), entropy.detach(), (clipped.to(weights.dtype) * weights).sum().detach())

    def denominator(self, responses: int, tokens: int, longest: int) -> float:
        """What a step's sums are divided by: its responses (N·G), its trained tokens, or N·G times the length limit."""
        return float(
            {"response": responses, "token": max(1, tokens), "constant": responses * longest}[self.aggregation]
        )


LOSSES: dict[str, PolicyLoss] = {}
"""By the name in `algorithm.loss`."""


def loss(
    name: str, aggregation: Aggregation = "response", statistics: Statistics | None = None
) -> Callable[[Gain], Gain]:
    """Register a function as the loss of that name; with `statistics` its scope is the batch (`PolicyLoss`)."""

    def register(gain: Gain) -> Gain:
        LOSSES[name] = PolicyLoss(gain, aggregation, statistics)
        return gain

    return register


def _clipped(ratio: Tensor, advantages: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), and where it picks the clipped branch."""
    return _between(ratio, advantages, 1.0 - coefficients.clip_low, 1.0 + coefficients.clip_high)


def _between(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    plain = ratio * advantages
    bounded = ratio.clamp(low, high) * advantages
    return torch.minimum(plain, bounded), bounded < plain


@loss("grpo")
def grpo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of token ratios, mean over |o_i|
    (Periodic Asynchrony eq. 4–9, as implementations read them)."""
    return _clipped(terms.ratio, terms.advantages, coefficients)


@loss("dapo", aggregation="token")
def dapo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """The same surrogate, mean over all tokens of the step
    (DAPO, arXiv:2503.14476, eq. 8; clip-higher is ε_high > ε_low)."""
    return _clipped(terms.ratio, terms.advantages, coefficients)


@loss("dr_grpo", aggregation="constant")
def dr_grpo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """The same surrogate without the length bias: the sum over tokens by a constant
    (Dr. GRPO, arXiv:2503.20783, §3.2)."""
    return _clipped(terms.ratio, terms.advantages, coefficients)


@loss("gspo")
def gspo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of the sequence ratio s_i = exp(1/|o_i| Σ_t log π/π_old) (GSPO, arXiv:2507.18071, eq. 5–7).

    Written as its token form (eq. 14): value s_i, gradient s_i ∇ log π_t, whose mean over t is the gradient of s_i.
    """
    logs = (terms.logprobs - terms.old).detach()
    sums = torch.zeros(terms.responses, dtype=logs.dtype, device=logs.device).index_add_(
        0, terms.response, logs * terms.weights
    )
    mean = terms.whole(sums)[terms.response]
    ratio = torch.exp(mean + terms.logprobs - terms.logprobs.detach())
    return _clipped(ratio, terms.advantages, coefficients)


@loss("cispo", aggregation="token")
def cispo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """sg[clip(r, 1 − ε_low, 1 + ε_high)] · A · log π:
    every token keeps a gradient (MiniMax-M1, arXiv:2506.13585, eq. 4–5)."""
    ratio = terms.ratio.detach()
    bounded = ratio.clamp(1.0 - coefficients.clip_low, 1.0 + coefficients.clip_high)
    return bounded * terms.advantages * terms.logprobs, bounded != ratio


@loss("m2po", aggregation="token", statistics=second_moment_limit)
def m2po(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """r A without a clip, but of the outward tokens (A > 0 and r > 1, or A < 0 and r < 1) those of the largest (log r)²
    are masked, as many as it takes for the mean (log r)² over the others to be at most τ = 0.04.

    Second-Moment Trust Policy Optimization, arXiv:2510.01161, its estimate of M_2 and Algorithm 1; summed over all
    valid tokens, masked ones too. Read from AReaL's documentation, which gives both formulas, and from two
    implementations that agree on Algorithm 1's quadrants and on τ (Trinity-RFT PR 616, verl PR 4131); the paper's own
    text and equation numbers: unconfirmed.
    """
    (limit,) = terms.statistics
    logs = (terms.logprobs - terms.old).detach()
    masked = outward(logs, terms.advantages) & (logs.square() > limit)
    return torch.where(masked, torch.zeros_like(terms.logprobs), terms.ratio * terms.advantages), masked


@loss("bapo", aggregation="token", statistics=balanced_bounds)
def bapo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, c_low, c_high) A) with bounds chosen for the batch so that tokens with A > 0 bring the share ρ0
    of it.

    Balanced Policy Optimization with Adaptive Clipping, arXiv:2510.18927, eq. 8 and Algorithm 1. ρ0 = 0.5, c_low from
    0.6 to 0.9 and c_high from 1.2 to 3.0 are the paper's by its authors' own release (WooooDyy/BAPO). Unconfirmed: the
    step 0.05 (that release's default config), and whether eq. 8 weighs tokens by π_old (the release does not, nor do
    we). The release raises c_low first, the paper (as Trinity-RFT issue 621 gives it) c_high; we follow the paper.
    Measured by the surrogate's value, raising c_low can't raise the share: where c_high = 3.0 is not enough, c_low ends
    at 0.9.
    """
    low, high = terms.statistics
    return _between(terms.ratio, terms.advantages, low, high)
