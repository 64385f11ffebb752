"""The policy loss of a micro-batch: a sum, which the step's denominator divides at the end of the step.

All terms (surrogate, KL, entropy) share one aggregation. To add a loss, decorate a function with `loss` that returns
each token's gain. Gains may be weighted if the trainer's old policy and the instance give a token different
probabilities (`correction_weights`, `rejection_mask`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from engine.algorithm.batch_statistics import (
    Coefficients,
    Statistics,
    balanced_bounds,
    outward_mask,
    second_moment_limit,
)
from engine.algorithm.kl import KL, bounded_log, ratio_of


def correction_weights(log_ratio: Tensor, kind: str, limit: float) -> Tensor:
    """[T] weights of the tokens' gains, without gradient, from w = π_old / π_rollout.

    `log_ratio`: [T] log w of each token, or of its response at each of its tokens (`Terms.at_level`).

    "truncate": min(w, limit) (truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training", eq. 4). "mask": w if 1/limit ≤ w ≤ limit, else 0 (masked importance sampling:
    values outside are dropped instead of bounded). Raises ValueError for another `kind`.
    """
    ratio = ratio_of(log_ratio).detach()
    if kind == "truncate":
        return ratio.clamp(max=limit)
    if kind == "mask":
        return torch.where(_inside(ratio, limit), ratio, torch.zeros_like(ratio))
    raise ValueError(f'mismatch correction "{kind}" is unknown, expected "truncate" or "mask"')


def rejection_mask(log_ratio: Tensor, limit: float) -> Tensor:
    """[T] 1 if 1/limit ≤ w ≤ limit, else 0, without gradient; `log_ratio` as in `correction_weights`."""
    ratio = ratio_of(log_ratio).detach()
    return torch.where(_inside(ratio, limit), torch.ones_like(ratio), torch.zeros_like(ratio))


def _inside(ratio: Tensor, limit: float) -> Tensor:
    return (ratio >= 1 / limit) & (ratio <= limit)


Aggregation = Literal["response", "token", "constant"]
"""How token values are combined. "response": mean over each response's tokens, then over responses. "token": mean over
all tokens of the step. "constant": sum over tokens, divided by responses times the length limit."""


@dataclass(frozen=True)
class Terms:
    """Input of the loss for a micro-batch of T response tokens. All tensors are [T]."""

    logprobs: Tensor
    """Log-probabilities under the policy, with gradient."""
    old: Tensor
    """Log-probabilities under the old policy, detached."""
    reference: Tensor | None
    """Log-probabilities under the reference, detached; None if kl_coef is 0."""
    entropy: Tensor
    """Entropy of the policy's distribution at each token, in nats."""
    advantages: Tensor
    """Each token's advantage, which is its response's."""
    weights: Tensor
    """Each token's weight in the sums: 0 if it is masked, else 1/|o_i| (aggregation "response") or 1."""
    rollout: Tensor
    """Log-probabilities returned by the instance."""
    response: Tensor
    """int64: index of the token's response in the micro-batch."""
    responses: int
    """R, number of responses in the micro-batch. It is the same on all context-parallel ranks, even on a rank without
    tokens of some response."""
    whole: Callable[[Tensor], Tensor] = lambda sums: sums
    """Sums [R] over the responses' tokens on this rank → sums over all context-parallel ranks, without gradient.
    Collective over these ranks."""
    statistics: tuple[float, ...] = ()
    """Result of the loss's `statistics` over the whole batch; () for a loss of group scope."""
    sampled: Tensor | None = None
    """The trainer's log-probabilities in the numerator of w, detached; None: use the policy's."""

    @cached_property
    def ratio(self) -> Tensor:
        """Token ratios π / π_old, with gradient."""
        return ratio_of(self.logprobs - self.old)

    @cached_property
    def sequence_ratio(self) -> Tensor:
        """[T] s_i = exp(Σ_t weight · log π/π_old), summed over its response, with the gradient s_i ∇ log π_t (GSPO eq.
        14).

        This is the mean over the response if the weights are 1/|o_i|. Collective over the context-parallel ranks.
        """
        logs = (self.logprobs - self.old).detach()
        sums = torch.zeros(self.responses, dtype=logs.dtype, device=logs.device).index_add_(
            0, self.response, logs * self.weights
        )
        mean = self.whole(sums)[self.response]
        return torch.exp(bounded_log(mean + self.logprobs - self.logprobs.detach()))

    def at_level(self, logs: Tensor, level: str) -> Tensor:
        """Convert [T] log-ratios of tokens to a `level`: "token" leaves them unchanged, "sequence" sums them over the
        trained tokens of the response, "geometric" takes their mean over these. All levels but "token" are collectives
        over the context-parallel ranks."""
        if level == "token":
            return logs
        trained = (self.weights > 0).to(logs.dtype)
        sums = torch.zeros(self.responses, dtype=logs.dtype, device=logs.device)
        whole = self.whole(sums.index_add(0, self.response, logs * trained))
        if level == "geometric":
            whole = whole / self.whole(sums.index_add(0, self.response, trained)).clamp(min=1)
        return whole[self.response]


@dataclass(frozen=True)
class Loss:
    """Weighted sums over the micro-batch's tokens, which the step divides. Only `total` carries a gradient."""

    total: Tensor
    """Sum of the loss, including its KL and entropy terms."""
    kl: Tensor
    """Sum of the KL estimates, without `kl_coef`."""
    entropy: Tensor
    """Sum of the entropies in nats, without `entropy_coef`."""
    clipped: Tensor
    """Summed weights of the tokens at which the clip or the mask is active."""
    dropped: Tensor
    """Summed weights of the tokens whose gain the correction for the rollouts sets to 0."""
    ratio_max: Tensor
    """Largest ratio of the loss among the micro-batch's trained tokens; 0 without any, NaN if any is NaN."""


Gain = Callable[[Terms, Coefficients], tuple[Tensor, Tensor]]
"""Returns ([T] gain of each token, with gradient; [T] bool, whether the clip is active)."""


@dataclass(frozen=True)
class PolicyLoss:
    """A loss −Σ weight · (gain − β·KL + c·entropy)."""

    gain: Gain
    aggregation: Aggregation = "response"
    statistics: Statistics | None = None
    """Computes numbers over the trained tokens of the step's whole batch, before the first backward pass; `gain` gets
    them as `Terms.statistics`. None for a loss of group scope."""
    ratio: Callable[[Terms], Tensor] = operator.attrgetter("ratio")
    """The ratio that the loss bounds, [T]."""

    @property
    def scope(self) -> Literal["group", "batch"]:
        """Return "batch" if the loss has statistics, else "group". A loss of batch scope is rejected in `periodic`,
        which trains groups as they arrive."""
        return "batch" if self.statistics is not None else "group"

    def __call__(self, terms: Terms, coefficients: Coefficients) -> Loss:
        """Return the micro-batch's sums."""
        gain, clipped = self.gain(terms, coefficients)
        weights = terms.weights
        dropped = weights.new_zeros(())
        if (factor := _correction(terms, coefficients)) is not None:
            gain = gain * factor
            dropped = ((factor == 0).to(weights.dtype) * weights).sum()
        entropy = (terms.entropy * weights).sum()
        objective = (gain * weights).sum()
        kl = gain.new_zeros(())
        if terms.reference is not None:
            kl = (KL[coefficients.kl_estimator](terms.logprobs, terms.reference) * weights).sum()
            objective = objective - coefficients.kl_coef * kl
        if coefficients.entropy_coef:
            objective = objective + coefficients.entropy_coef * entropy
        ratio = torch.where(weights > 0, self.ratio(terms).detach(), 0.0)
        return Loss(
            total=-objective,
            kl=kl.detach(),
            entropy=entropy.detach(),
            clipped=(clipped.to(weights.dtype) * weights).sum().detach(),
            dropped=dropped,
            ratio_max=ratio.max() if ratio.numel() else ratio.new_zeros(()),
        )

    def denominator(self, responses: int, tokens: int, longest: int) -> float:
        """Return the divisor of a step's sums: its responses (N·G), its trained tokens (at least 1), or N·G times the
        length limit `longest`."""
        return float(
            {"response": responses, "token": max(1, tokens), "constant": responses * longest}[self.aggregation]
        )


LOSSES: dict[str, PolicyLoss] = {}
"""The losses by name, as in `algorithm.loss`."""


def loss(
    name: str,
    aggregation: Aggregation = "response",
    statistics: Statistics | None = None,
    ratio: Callable[[Terms], Tensor] = operator.attrgetter("ratio"),
) -> Callable[[Gain], Gain]:
    """Decorator that registers a function as the loss `name`. With `statistics`, its scope is the batch
    (`PolicyLoss`)."""

    def register(gain: Gain) -> Gain:
        LOSSES[name] = PolicyLoss(gain, aggregation, statistics, ratio)
        return gain

    return register


def _correction(terms: Terms, coefficients: Coefficients) -> Tensor | None:
    """Return the [T] factors of the gains that correct for the rollouts, without gradient; None if there is no
    correction."""
    if coefficients.mismatch == coefficients.mismatch_reject == "none":
        return None
    sampled = terms.logprobs.detach() if terms.sampled is None else terms.sampled
    gaps = sampled - terms.rollout
    factor = None
    if coefficients.mismatch != "none":
        logs = terms.at_level(gaps, coefficients.mismatch_level)
        factor = correction_weights(logs, coefficients.mismatch, coefficients.mismatch_limit)
    if coefficients.mismatch_reject != "none":
        logs = terms.at_level(gaps, coefficients.mismatch_reject)
        kept = rejection_mask(logs, coefficients.mismatch_reject_limit)
        factor = kept if factor is None else factor * kept
    return factor


def _clipped(ratio: Tensor, advantages: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), and whether the clipped branch is the minimum."""
    return _clipped_to(ratio, advantages, 1.0 - coefficients.clip_low, 1.0 + coefficients.clip_high)


def _dual_clipped(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """`_clipped` of the token ratios. With a dual clip c, max(that, c A) if A < 0 (Dual-clip PPO, arXiv:1912.09729),
    because PPO's clip leaves the ratio of such a token unbounded above."""
    gain, clipped = _clipped(terms.ratio, terms.advantages, coefficients)
    if not coefficients.dual_clip:
        return gain, clipped
    least = coefficients.dual_clip * terms.advantages
    below = (terms.advantages < 0) & (gain < least)
    return torch.where(below, least, gain), clipped | below


def _clipped_to(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, low, high) A), and whether the clipped branch is the minimum."""
    plain = ratio * advantages
    bounded = ratio.clamp(low, high) * advantages
    return torch.minimum(plain, bounded), bounded < plain


@loss("grpo")
def grpo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of token ratios, averaged over the |o_i| tokens of a response, then over responses (Periodic
    Asynchrony eq. 4–9, as commonly implemented)."""
    return _dual_clipped(terms, coefficients)


@loss("dapo", aggregation="token")
def dapo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """The surrogate of `grpo`, averaged over all tokens of the step (DAPO, arXiv:2503.14476, eq. 8; its clip-higher is
    ε_high > ε_low)."""
    return _dual_clipped(terms, coefficients)


@loss("dr_grpo", aggregation="constant")
def dr_grpo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """The surrogate of `grpo` without its length bias: the sum over tokens, divided by a constant (Dr. GRPO,
    arXiv:2503.20783, §3.2)."""
    return _dual_clipped(terms, coefficients)


@loss("gspo", ratio=operator.attrgetter("sequence_ratio"))
def gspo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of the sequence ratio s_i = exp(1/|o_i| Σ_t log π/π_old) (GSPO, arXiv:2507.18071, eq. 5–7).

    It is computed in the token form (eq. 14): each token has the value s_i and the gradient s_i ∇ log π_t, whose mean
    over t is the gradient of s_i.
    """
    return _clipped(terms.sequence_ratio, terms.advantages, coefficients)


@loss("cispo", aggregation="token")
def cispo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """sg[clip(r, 1 − ε_low, 1 + ε_high)] · A · log π, where sg stops the gradient: every token keeps a gradient
    (MiniMax-M1, arXiv:2506.13585, eq. 4–5)."""
    ratio = terms.ratio.detach()
    bounded = ratio.clamp(1.0 - coefficients.clip_low, 1.0 + coefficients.clip_high)
    return bounded * terms.advantages * terms.logprobs, bounded != ratio


@loss("gpg", aggregation="token")
def gpg(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """A log π, without ratio, clip or old policy, averaged over all tokens of the step (GPG, arXiv:2504.02546; verl's
    loss with this name). It does not correct for data sampled from other weights."""
    return terms.advantages * terms.logprobs, torch.zeros_like(terms.advantages, dtype=torch.bool)


@loss("m2po", aggregation="token", statistics=second_moment_limit)
def m2po(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """r A without a clip. Outward tokens (A > 0 and r > 1, or A < 0 and r < 1) with the largest (log r)² are masked, as
    many as needed for the mean (log r)² over the other outward tokens to be at most τ = 0.04.

    Second-Moment Trust Policy Optimization, arXiv:2510.01161, its estimate of M_2 and Algorithm 1; the denominator
    counts all valid tokens, including masked ones. The authors' release (Infini-AI-Lab/M2PO) has the same quadrants and
    τ. It bounds the capped mean (`second_moment_limit`), and clips where this code masks: the gradients are the same.
    Unconfirmed: the paper's text and equation numbers, which come from AReaL's documentation.
    """
    (limit,) = terms.statistics
    logs = (terms.logprobs - terms.old).detach()
    masked = outward_mask(logs, terms.advantages) & (logs.square() > limit)
    return torch.where(masked, torch.zeros_like(terms.logprobs), terms.ratio * terms.advantages), masked


@loss("bapo", aggregation="token", statistics=balanced_bounds)
def bapo(terms: Terms, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, c_low, c_high) A), with bounds chosen for each batch so that tokens with A > 0 contribute the
    share ρ0 of it.

    Balanced Policy Optimization with Adaptive Clipping, arXiv:2510.18927, eq. 8 and Algorithm 1. ρ0 = 0.5, c_low from
    0.6 to 0.9 and c_high from 1.2 to 3.0 are the values of the authors' release (WooooDyy/BAPO). Unconfirmed: the step
    0.05 (that release's default config), and whether eq. 8 weights tokens by π_old (neither the release nor this code
    does). The release raises c_low first, the paper (according to Trinity-RFT issue 621) c_high; this code follows the
    paper. Raising c_low can't raise the share as measured here, by the surrogate's value: if c_high = 3.0 is not
    enough, c_low ends at 0.9.
    """
    low, high = terms.statistics
    return _clipped_to(terms.ratio, terms.advantages, low, high)
