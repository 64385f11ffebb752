"""Advantages: how much better a response was than its peers. A new one is a function with a decorator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-6

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rewards, tokens of the responses) of one prompt [G] or, with scope "batch",
of the step's prompts [N, G] → advantages."""


@dataclass(frozen=True)
class Advantage:
    """An advantage over one group, which can be trained as soon as it is complete, or over the whole batch,
    which can't."""

    compute: Compute
    least: int = 2
    """Smallest group that it is defined for."""
    scope: Literal["group", "batch"] = "group"
    """What its statistics are over; "batch" is refused where groups are trained as they arrive."""
    only_unequal: bool = False
    """The step's gradient is divided by the share of groups with unequal rewards (a factor, applied at its end)."""

    def __call__(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """Advantages, shaped as the rewards. Raises ValueError for groups that are too small,
        or a result that is not finite."""
        if rewards.shape[-1] < self.least:
            raise ValueError(f"this advantage needs groups of at least {self.least} responses, got {rewards.shape[-1]}")
        found = self.compute(rewards, lengths)
        if found.shape != rewards.shape or not bool(torch.isfinite(found).all()):
            raise ValueError(f"an advantage must be one finite number per response, got {found} for rewards {rewards}")
        return found


ADVANTAGES: dict[str, Advantage] = {}
"""By the name in `algorithm.advantage`."""


def advantage(
    name: str, least: int = 2, scope: Literal["group", "batch"] = "group", only_unequal: bool = False
) -> Callable[[Compute], Compute]:
    """Register a function as the advantage of that name; the arguments are Advantage's."""

    def register(compute: Compute) -> Compute:
        ADVANTAGES[name] = Advantage(compute, least, scope, only_unequal)
        return compute

    return register


def _centred(rewards: Tensor, baseline: Tensor) -> Tensor:
    """R − b; exactly 0 for equal rewards, whose mean may be off by a rounding."""
    return torch.zeros_like(rewards) if bool((rewards == rewards[0]).all()) else rewards - baseline


@advantage("grpo")
def grpo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Group-relative advantage A = (R − mean) / (std + 1e-6), sample standard deviation over the group.

    Equal rewards give exactly 0. DeepSeekMath (GRPO) §4.1.2; Periodic Asynchrony uses it unchanged.
    """
    return _centred(rewards, rewards.mean()) / (rewards.std(unbiased=True) + EPSILON)


@advantage("dr_grpo")
def dr_grpo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """A = R − mean, without the division that favours easy and hard prompts (Dr. GRPO, arXiv:2503.20783, eq. 3)."""
    return _centred(rewards, rewards.mean())


@advantage("rloo")
def rloo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """A_i = R_i − mean of the others' rewards = G/(G−1) · (R_i − mean) (RLOO, arXiv:2402.14740, eq. 8)."""
    count = rewards.numel()
    return _centred(rewards, rewards.mean()) * (count / (count - 1))


@advantage("opo")
def opo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """A = R − Σ l R / Σ l: the baseline of least variance if gradients' sizes grow with lengths l (OPO,
    arXiv:2505.23585).

    A group of empty responses has no such mean: 0.
    """
    total = lengths.sum()
    if not total:
        return torch.zeros_like(rewards)
    return _centred(rewards, (lengths * rewards).sum() / total)


@advantage("grpo_passk")
def grpo_passk(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Only the best response has one: (largest − second largest R) / (std + 1e-6), an unbiased step on max R = pass@G.

    Tang et al. 2025, arXiv:2503.19595, §4 with k = G, divided by the group's standard deviation as in verl's estimator
    of this name. A tie for the best gives 0 to all.
    """
    best, second = rewards.topk(2).values
    found = torch.zeros_like(rewards)
    found[rewards.argmax()] = (best - second) / (rewards.std(unbiased=True) + EPSILON)
    return found


@advantage("gpg", only_unequal=True)
def gpg(rewards: Tensor, lengths: Tensor) -> Tensor:
    """A = R − mean, and the gradient times B / (B − M) for M of B groups with equal rewards (GPG, arXiv:2504.02546, eq.
    6).

    The factor is linear in the gradient, so it is applied at the step's end and groups can be streamed.
    """
    return _centred(rewards, rewards.mean())


@advantage("reinforce_plus_plus", least=1, scope="batch")
def reinforce_plus_plus(rewards: Tensor, lengths: Tensor) -> Tensor:
    """(R − mean) / std over all tokens of the batch, each with its response's reward (REINFORCE++, arXiv:2501.03262,
    eq. 9).

    γ = 1 and the KL in the loss, not in the reward. [N, G] → [N, G].
    """
    return _whitened(rewards, lengths)


@advantage("reinforce_plus_plus_baseline", scope="batch")
def reinforce_plus_plus_baseline(rewards: Tensor, lengths: Tensor) -> Tensor:
    """R − mean of its group, whitened over all tokens of the batch (REINFORCE++-baseline, arXiv:2501.03262, §3.3)."""
    return _whitened(torch.stack([_centred(group, group.mean()) for group in rewards]), lengths)


def _whitened(values: Tensor, counts: Tensor) -> Tensor:
    """(x − mean) / √(variance + 1e-8), with unbiased statistics over values that each stand `counts` times."""
    total = counts.sum()
    if total < 2:
        return torch.zeros_like(values)
    mean = (counts * values).sum() / total
    variance = (counts * (values - mean).square()).sum() / (total - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8)
