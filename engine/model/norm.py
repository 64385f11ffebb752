"""RMSNorm for Megatron's layers, also under sequence parallelism, which Megatron's own torch wrapper refuses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model import npu_operators


class RMSNorm(torch.nn.Module):
    """x / rms(x) · weight over the last dimension, [..., hidden] → [..., hidden]. The rms is computed in fp32 for every
    dtype."""

    marks_sequence_parallel = True
    """Whether Megatron is told, under sequence parallelism, to sum the weight's gradient over the tensor ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:  # noqa: ANN401
        """The arguments are those of Megatron's norms. Under sequence parallelism each rank's gradient of the weight is
        only a partial sum."""
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # an attribute that Megatron reads, and that torch's Parameter does not declare
        self.weight.sequence_parallel = config.sequence_parallel and self.marks_sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, normalised over the last dimension."""
        if npu_operators.on_npu(x):
            return npu_operators.rms_norm(x, self.weight, self.eps)
        if x.device.type == "cpu" and x.dtype is torch.float32:
            out: Tensor = _Normalise.apply(x, self.weight, self.eps)
            return out
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class _Normalise(torch.autograd.Function):
    """`F.rms_norm` for the CPU in fp32, where torch has no kernel for it: forward and backward take half the time of
    torch's single operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: ANN401
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        """With n = x·s and g = grad·w: d x = s · (g − n · mean(g·n)), d w = Σ grad·n."""
        x, weight, scale = ctx.saved_tensors
        normal = x * scale
        to_weight = (grad * normal).flatten(0, -2).sum(0)
        scaled = grad * weight
        along = (scaled * normal).mean(-1, keepdim=True)
        return scaled.addcmul_(normal, along, value=-1).mul_(scale), to_weight, None


class HeadNorm(RMSNorm):
    """RMSNorm of queries and keys, per head. It is not marked, because Megatron knows these norms by their names and
    sums their gradients over the tensor ranks anyway."""

    marks_sequence_parallel = False
