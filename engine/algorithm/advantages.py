"""Advantages: how much better a response is than the others of its group. To add one, decorate a function with
`advantage`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.algorithm.shaping import are_equal

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rewards, lengths: trained tokens of the responses) → advantages, in fp64. All are [G] for one prompt or, with scope
"batch", [N, G] for the prompts of the step."""


@dataclass(frozen=True)
class Advantage:
    """An advantage with its scope. With scope "group" a group can be trained once it is complete, with "batch" only
    once all groups are."""

    compute: Compute
    least: int = 2
    """Smallest group size for which it is defined."""
    scope: Literal["group", "batch"] = "group"
    """The set over which its statistics are computed. "batch" is rejected in modes that train groups as they arrive."""
    only_unequal: bool = False
    """Whether the step's gradient is divided, at the end of the step, by the share of groups with unequal rewards."""

    def __call__(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """Return the advantages, in the shape and dtype of the rewards; they are computed in fp64. Raises ValueError
        for groups that are too small, and for a result with another shape or a value that is not finite."""
        if rewards.shape[-1] < self.least:
            raise ValueError(f"this advantage needs groups of at least {self.least} responses, got {rewards.shape[-1]}")
        found = self.compute(rewards.double(), lengths.double()).to(rewards.dtype)
        if found.shape != rewards.shape or not bool(torch.isfinite(found).all()):
            raise ValueError(f"an advantage must be one finite number per response, got {found} for rewards {rewards}")
        return found


ADVANTAGES: dict[str, Advantage] = {}
"""The advantages by name, as in `algorithm.advantage`."""


def advantage(
    name: str, least: int = 2, scope: Literal["group", "batch"] = "group", only_unequal: bool = False
) -> Callable[[Compute], Compute]:
    """Decorator that registers a function as the advantage `name`. The other arguments are the fields of
    `Advantage`."""

    def register(compute: Compute) -> Compute:
        ADVANTAGES[name] = Advantage(compute, least, scope, only_unequal)
        return compute

    return register


def _centred(rewards: Tensor, baseline: Tensor) -> Tensor:
    """R − b; exactly 0 if all rewards are equal, where rounding would shift all of them in one direction."""
    return torch.zeros_like(rewards) if are_equal(rewards.tolist()) else rewards - baseline


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
    """A = R − Σ l R / Σ l with lengths l: the baseline with the least variance if the squared norm of a response's
    gradient is proportional to its length (OPO, arXiv:2505.23585).

    0 for a group without a trained token.
    """
    total = lengths.sum()
    if not total:
        return torch.zeros_like(rewards)
    return _centred(rewards, (lengths * rewards).sum() / total)


@advantage("grpo_passk")
def grpo_passk(rewards: Tensor, lengths: Tensor) -> Tensor:
    """(largest − second largest R) / (std + 1e-6) for the best response, 0 for the others.

    Tang et al. 2025, arXiv:2503.19595, §4 with k = G: the difference gives an unbiased gradient of max R, which is
    pass@G. It is divided by the group's standard deviation, as in verl's estimator with this name. All get 0 if two
    responses share the largest reward.
    """
    best = rewards.topk(2).values
    found = torch.zeros_like(rewards)
    if not are_equal(best.tolist()):
        found[rewards.argmax()] = (best[0] - best[1]) / (rewards.std(unbiased=True) + EPSILON)
    return found


@advantage("gpg", only_unequal=True)
def gpg(rewards: Tensor, lengths: Tensor) -> Tensor:
    """A = R − mean. The gradient is multiplied by B / (B − M) if M of the B groups have equal rewards (GPG,
    arXiv:2504.02546, eq. 6).

    The factor is applied once at the end of the step, so groups can be trained as they arrive.
    """
    return _centred(rewards, rewards.mean())


@advantage("reinforce_plus_plus", least=1, scope="batch")
def reinforce_plus_plus(rewards: Tensor, lengths: Tensor) -> Tensor:
    """(R − mean) / std, with statistics over the trained tokens of the batch, each with its response's reward
    (REINFORCE++, arXiv:2501.03262, eq. 9). [N, G] → [N, G].

    The discount γ is 1, and the KL is a term of the loss instead of the reward.
    """
    return _whitened(rewards, lengths)


@advantage("reinforce_plus_plus_baseline", scope="batch")
def reinforce_plus_plus_baseline(rewards: Tensor, lengths: Tensor) -> Tensor:
    """R − mean of its group, then whitened over the trained tokens of the batch (REINFORCE++-baseline,
    arXiv:2501.03262, §3.3). [N, G] → [N, G]."""
    return _whitened(torch.stack([_centred(group, group.mean()) for group in rewards]), lengths)


def _whitened(values: Tensor, counts: Tensor) -> Tensor:
    """(x − mean) / √(variance + 1e-8), with unbiased statistics in which each value counts `counts` times; 0 for fewer
    than two values, and if the values that count are equal."""
    total = counts.sum()
    if total < 2 or are_equal(values[counts > 0].tolist()):
        return torch.zeros_like(values)
    mean = (counts * values).sum() / total
    variance = (counts * (values - mean).square()).sum() / (total - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8)
