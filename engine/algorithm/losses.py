"""The policy loss of a micro-batch, as a sum that the step's own denominator divides at its end.

All terms (surrogate, KL, entropy) share one aggregation. A new loss is a function with a decorator that gives each token's gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.algorithm.correction import correction
from engine.algorithm.kl import KL

Aggregation = Literal["response", "token", "constant"]
"""The mean over each response's tokens, then over responses; the mean over all tokens of the step; the sum over tokens divided by
responses times the length limit."""


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
    whole: Callable[[Tensor], Tensor] = lambda sums: sums
    """Sums over responses' tokens [R] on this rank → over all context-parallel ranks, without gradient."""

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
    """How the gains are corrected for tokens that the instance sampled with another probability ("truncate", "mask")."""
    mismatch_limit: float = 2.0


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

    def __call__(self, terms: Terms, coefficients: Coefficients) -> Loss:
        """The micro-batch's sums."""
        gain, clipped = self.gain(terms, coefficients)
        if coefficients.mismatch != "none":
            gain = gain * correction(terms.logprobs.detach(), terms.rollout, coefficients.mismatch, coefficients.mismatch_limit)
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
        return float({"response": responses, "token": max(1, tokens), "constant": responses * longest}[self.aggregation])


LOSSES: dict[str, PolicyLoss] = {}
"""By the name in `algorithm.loss`."""


def loss(name: str, aggregation: Aggregation = "response") -> Callable[[Gain], Gain]:
    """Register a function as the loss of that name."""

    def register(gain: Gain) -> Gain:
        LOSSES[name] = PolicyLoss(gain, aggregation)
        return gain

    return register


def _clipped(ratio: Tensor, advantages: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), and where it picks the clipped branch."""
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - coefficients.clip_low, 1.0 + coefficients.clip_high) * advantages
    return torch.minimum(plain, bounded), bounded < plain


@loss("grpo")
def grpo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of token ratios, mean over |o_i| (Periodic Asynchrony eq. 4–9, as implementations read them)."""
    return _clipped(terms.ratio, terms.advantages, coefficients)


@loss("dapo", aggregation="token")
def dapo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """The same surrogate, mean over all tokens of the step (DAPO, arXiv:2503.14476, eq. 8; clip-higher is ε_high > ε_low)."""
    return _clipped(terms.ratio, terms.advantages, coefficients)


@loss("dr_grpo", aggregation="constant")
def dr_grpo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """The same surrogate without the length bias: the sum over tokens by a constant (Dr. GRPO, arXiv:2503.20783, §3.2)."""
    return _clipped(terms.ratio, terms.advantages, coefficients)


@loss("gspo")
def gspo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of the sequence ratio s_i = exp(1/|o_i| Σ_t log π/π_old) (GSPO, arXiv:2507.18071, eq. 5–7).

    Written as its token form (eq. 14): value s_i, gradient s_i ∇ log π_t, whose mean over t is the gradient of s_i.
    """
    logs = (terms.logprobs - terms.old).detach()
    count = int(terms.response.max()) + 1 if terms.response.numel() else 0
    sums = torch.zeros(count, dtype=logs.dtype, device=logs.device).index_add_(0, terms.response, logs * terms.weights)
    mean = terms.whole(sums)[terms.response] if count else logs
    ratio = torch.exp(mean + terms.logprobs - terms.logprobs.detach())
    return _clipped(ratio, terms.advantages, coefficients)


@loss("cispo", aggregation="token")
def cispo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """sg[clip(r, 1 − ε_low, 1 + ε_high)] · A · log π: every token keeps a gradient (MiniMax-M1, arXiv:2506.13585, eq. 4–5)."""
    ratio = terms.ratio.detach()
    bounded = ratio.clamp(1.0 - coefficients.clip_low, 1.0 + coefficients.clip_high)
    return bounded * terms.advantages * terms.logprobs, bounded != ratio
