"""RMSNorm for Megatron's layers: also under sequence parallelism, which Megatron's own torch wrapper refuses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """x / rms(x) · weight over the last dimension, [..., hidden] → the same; statistics in fp32 whatever the dtype."""

    marks_sequence_parallel = True

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:  # noqa: ANN401
        """Signature of Megatron's norms. Under sequence parallelism the weight's gradient is a partial sum per rank."""
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel and self.marks_sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class HeadNorm(RMSNorm):
    """Of queries and keys, per head: Megatron sums its gradient over tensor ranks by its name, so it is not marked."""

    marks_sequence_parallel = False
