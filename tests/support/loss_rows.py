"""Rows of tokens, as the losses get them."""

from dataclasses import replace

import torch

from engine.algorithm.losses import Terms


def loss_row(log_ratios, advantages, dtype=torch.float64, **changes):
    """Tokens of one response with these log-ratios to the old policy, of weight 1. `changes`: other parts."""
    old = torch.linspace(-3, -0.5, len(log_ratios), dtype=dtype)
    ones = torch.ones_like(old)
    row = Terms(
        logprobs=(old + torch.as_tensor(log_ratios, dtype=dtype)).requires_grad_(),
        old=old,
        reference=None,
        entropy=ones,
        advantages=torch.as_tensor(advantages, dtype=dtype),
        weights=ones,
        rollout=old,
        response=torch.zeros(len(log_ratios), dtype=torch.long),
        responses=1,
    )
    return replace(row, **changes)
