"""KL estimates from log-probabilities of sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token KL(π‖π_ref) estimate e^x − x − 1 with x = log π_ref − log π (Periodic Asynchrony eq. 6).

    Both [T]; never negative, 0 where they agree; carries the gradient of `logprobs`. `expm1` keeps the small values that
    e^x − 1 would lose to rounding.
    """
    x = reference - logprobs
    return torch.expm1(x) - x
