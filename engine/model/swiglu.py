"""SwiGLU of the MLPs as one operation with its own backward pass. Half of the work of Megatron's unfused version is
copies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model import npu_operators
from engine.model.fusion import can_fuse, compile_once


class SwiGLU:
    """silu(gate) · up: [..., 2·f], gate and up side by side → [..., f]. Only the input is kept for the backward pass.

    This is not a torch module, because Megatron asks the modules of an MLP for their state and it has none.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        """Takes the argument of Megatron's activations; it is not used."""

    def __call__(self, joint: Tensor) -> Tensor:
        """Return silu(gate) · up."""
        if npu_operators.on_npu(joint):
            return npu_operators.npu_swiglu(joint)
        out: Tensor = _SwiGLU.apply(joint)
        return out


def swiglu_product(joint: Tensor) -> Tensor:
    """silu(gate) · up, for compilation."""
    gate, up = joint.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_gradient(joint: Tensor, grad: Tensor) -> Tensor:
    """The gradient of `swiglu_product`, for compilation."""
    gate, up = joint.chunk(2, -1)
    share = torch.sigmoid(gate)
    return torch.cat([grad * up * share * (1 + gate * (1 - share)), grad * gate * share], dim=-1)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(joint)
        if can_fuse(joint):
            fused: Tensor = compile_once(swiglu_product)(joint)
            return fused
        gate, up = joint.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        """With s = silu(g): d up = grad · s(g), d gate = grad · up · s'(g)."""
        (joint,) = ctx.saved_tensors
        if can_fuse(joint):
            fused: Tensor = compile_once(swiglu_gradient)(joint, grad)
            return fused
        gate, up = joint.chunk(2, -1)
        out = torch.empty_like(joint)
        to_gate, to_up = out.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=to_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=to_gate)
        return out
