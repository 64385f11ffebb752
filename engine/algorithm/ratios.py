"""Ratios of two probabilities of a token, computed from their logarithms."""

from __future__ import annotations

import torch
from torch import Tensor

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
