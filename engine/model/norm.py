"""RMSNorm for Megatron's layers. It supports sequence parallelism, which Megatron's torch wrapper refuses.

On a device, the norm before an MLP also adds attention's output to the residual stream, in the same pass. (The norm
before attention can't: the layer boundary, with its checkpoints and pipeline sends, lies between it and the preceding
sum.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.model import npu_operators
from engine.model.fusion import can_fuse, compile_once

Add = Callable[[tuple[Tensor, Tensor | None], Any, float], Any]
"""Megatron's sum of a part's (output, bias) and the residual stream, after dropout."""


@dataclass
class Sum:
    """The residual stream and what is to be added to it, for the norm that follows. Megatron's layer passes it on like
    the sum itself."""

    stream: Tensor
    added: Tensor
    made: Tensor | None = None
    """The sum, once the norm has computed it."""


def add_in_norm(training: bool, fused: bool) -> Add:
    """Return the sum after attention: a `Sum` on a device, else computed at once."""
    at_once: Add = get_bias_dropout_add(training, fused)

    def add(out: tuple[Tensor, Tensor | None], stream: Tensor, dropout: float) -> Any:  # noqa: ANN401
        added, bias = out
        later = bias is None and not dropout and (npu_operators.on_npu(added) or can_fuse(added))
        return Sum(stream, added) if later else at_once(out, stream, dropout)

    return add


def add_to_made(training: bool, fused: bool) -> Add:
    """Return the sum after the MLP, where the residual stream may be a `Sum` that has been computed."""
    at_once: Add = get_bias_dropout_add(training, fused)
    return lambda out, stream, dropout: at_once(out, stream.made if isinstance(stream, Sum) else stream, dropout)


class RMSNorm(torch.nn.Module):
    """x / rms(x) · weight over the last dimension, [..., hidden] → [..., hidden]. The rms is computed in fp32 for every
    dtype."""

    marks_sequence_parallel = True
    """Whether to tell Megatron, under sequence parallelism, to sum the weight's gradient over the tensor ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:  # noqa: ANN401
        """The arguments are those of Megatron's norms. Under sequence parallelism each rank's weight gradient is only a
        partial sum."""
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # an attribute that Megatron reads, and that torch's Parameter does not declare
        self.weight.sequence_parallel = config.sequence_parallel and self.marks_sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor | Sum) -> Tensor:
        """Return `x`, normalised over the last dimension. A `Sum` is computed first."""
        if isinstance(x, Sum):
            x.made, normed = _SumAndNorm.apply(x.stream, x.added, self.weight, self.eps)
            return normed
        if npu_operators.on_npu(x):
            return npu_operators.rms_norm(x, self.weight, self.eps)
        if x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16):
            out: Tensor = _Normalise.apply(x, self.weight, self.eps)
            return out
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class _Normalise(torch.autograd.Function):
    """`F.rms_norm` for the CPU, for which torch has no kernel. Forward and backward take half to two thirds of the time
    of torch's single operations. bf16 is computed in fp32, and the result is rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: ANN401
        wide = x.float()
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        """With n = x·s and g = grad·w: d x = s · (g − n · mean(g·n)), d w = Σ grad·n."""
        x, weight, scale = ctx.saved_tensors
        wide = grad.float()
        normal = x.float() * scale
        to_weight = (wide * normal).flatten(0, -2).sum(0).to(weight.dtype)
        scaled = wide * weight.float()
        along = (scaled * normal).mean(-1, keepdim=True)
        return scaled.addcmul_(normal, along, value=-1).mul_(scale).to(x.dtype), to_weight, None


class _SumAndNorm(torch.autograd.Function):
    """(a + b, RMSNorm of the sum) of a and b [..., hidden], compiled on CUDA. On an NPU the gradient combines that of
    the norm with a sum, because torch_npu has no gradient for `npu_add_rms_norm`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        made = npu_operators.add_rms_norm if npu_operators.on_npu(a) else compile_once(sum_and_norm)
        total, normed, scale = made(a, b, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_total: Tensor, to_normed: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # noqa: ANN401
        total, weight, scale = ctx.saved_tensors
        if npu_operators.on_npu(total):
            grad, to_weight = npu_operators.rms_norm_gradient(to_normed, total, weight, scale)
            grad = grad.add_(to_total)
        else:
            grad, to_weight = compile_once(sum_and_norm_gradient)((to_total, to_normed), total, weight, scale)
        return grad, grad, to_weight, None


def sum_and_norm(a: Tensor, b: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(a + b, RMSNorm of the sum, 1/rms [..., 1] in fp32 or wider). For compilation."""
    total = a + b
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return total, (wide * scale * weight).to(total.dtype), scale


def sum_and_norm_gradient(
    grads: tuple[Tensor, Tensor], total: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of a (and b) and of the weight, by the formula of `_Normalise`. For compilation."""
    to_total, to_normed = grads
    normal = total * scale
    to_weight = (to_normed * normal).flatten(0, -2).sum(0)
    scaled = to_normed.to(scale.dtype) * weight
    along = (scaled * normal).mean(-1, keepdim=True)
    return ((scaled - normal * along) * scale + to_total).to(total.dtype), to_weight.to(weight.dtype)


class HeadNorm(RMSNorm):
    """RMSNorm of queries and keys, per head. It is not marked, because Megatron recognizes these norms by name and sums
    their gradients over the tensor ranks anyway."""

    marks_sequence_parallel = False
