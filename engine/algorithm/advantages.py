"""Advantages: how much better a response was than its peers. A new one is a function with a decorator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-6

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rewards [G], tokens of the responses [G]) of one prompt → advantages [G], fp32."""


@dataclass(frozen=True)
class Advantage:
    """An advantage over one group, so that a group can be trained as soon as it is complete."""

    compute: Compute
    least: int = 2
    """Smallest group that it is defined for."""
    only_unequal: bool = False
    """The step's gradient is divided by the share of groups with unequal rewards (a factor, applied at its end)."""

    def __call__(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """Advantages [G]. Raises ValueError for a group that is too small, or a result that is no finite [G]."""
        if rewards.numel() < self.least:
            raise ValueError(f"this advantage needs groups of at least {self.least} responses, got {rewards.numel()}")
        found = self.compute(rewards, lengths)
        if found.shape != rewards.shape or not bool(torch.isfinite(found).all()):
            raise ValueError(f"an advantage must be one finite number per response, got {found} for rewards {rewards}")
        return found


ADVANTAGES: dict[str, Advantage] = {}
"""By the name in `algorithm.advantage`."""


def advantage(name: str, least: int = 2, only_unequal: bool = False) -> Callable[[Compute], Compute]:
    """Register a function as the advantage of that name; the arguments are Advantage's."""

    def register(compute: Compute) -> Compute:
        ADVANTAGES[name] = Advantage(compute, least, only_unequal)
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
    """A = R − Σ l R / Σ l: the baseline of least variance if gradients' sizes grow with lengths l (OPO, arXiv:2505.23585).

    A group of empty responses has no such mean: 0.
    """
    total = lengths.sum()
    if not total:
        return torch.zeros_like(rewards)
    return _centred(rewards, (lengths * rewards).sum() / total)


@advantage("grpo_passk")
def grpo_passk(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Only the best response has one: (largest − second largest R) / (std + 1e-6), an unbiased step on max R = pass@G.

    Tang et al. 2025, arXiv:2503.19595, §4 with k = G, divided by the group's standard deviation as in verl's estimator of this
    name. A tie for the best gives 0 to all.
    """
    best, second = rewards.topk(2).values
    found = torch.zeros_like(rewards)
    found[rewards.argmax()] = (best - second) / (rewards.std(unbiased=True) + EPSILON)
    return found


@advantage("gpg", only_unequal=True)
def gpg(rewards: Tensor, lengths: Tensor) -> Tensor:
    """A = R − mean, and the gradient times B / (B − M) for M of B groups with equal rewards (GPG, arXiv:2504.02546, eq. 6).

    The factor is linear in the gradient, so it is applied at the step's end and groups can be streamed.
    """
    return _centred(rewards, rewards.mean())
