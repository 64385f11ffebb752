"""Log-probabilities of given tokens, and the entropy of their distributions, from logits."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at the targets, and the entropy, both [T] in fp32.

    logits [T, V], targets [T]. The entropy (nats) carries gradients like the log-probabilities.
    """
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    logs = torch.log_softmax(scaled, dim=-1)
    chosen = logs.gather(-1, targets[:, None])[:, 0]
    return chosen, -(logs.exp() * logs).sum(-1)
