"""Ratios of two probabilities of a token, computed from their logarithms."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_LOG = 20.0
"""Bound of |log ratio| before it is exponentiated, as in verl. e^20 is 4.9e8; e^89 has no fp32 number, and where such a
ratio is clipped, its gradient would be 0 · inf, which is NaN."""


def bounded_log(log_ratio: Tensor) -> Tensor:
    """The log-ratio, at most `LARGEST_LOG` in size. Inside of the bound no bit of value or gradient changes; outside
    of it the gradient is 0. NaN stays."""
    return log_ratio.clamp(-LARGEST_LOG, LARGEST_LOG)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """The ratio, between e^−20 and e^20."""
    return torch.exp(bounded_log(log_ratio))
