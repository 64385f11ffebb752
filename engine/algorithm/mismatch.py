"""How much the log-probabilities of trainer and rollout instance differ for the same tokens (docs/architecture.md,
On-policy is checked)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.algorithm.kl import unbounded_k3
from engine.algorithm.ratios import bounded_log


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
