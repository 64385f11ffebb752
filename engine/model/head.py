"""The output layer with logits that are not rounded to bf16 (model.head_dtype = "float32").

bf16 logits near 20 are 1/8 apart, which accounts for most of the difference between two correct engines. The factors
stay bf16; their products are summed, and kept, in fp32. Gradients are those of a bf16 layer.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable


def head_product(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,  # noqa: ANN401
    **unused: Any,  # noqa: ANN401
) -> Tensor:
    """x [S, b, k] · weightᵀ with weight [n, k], both bf16 → [S, b, n] in fp32. The arguments are those of Megatron's
    products (`ColumnParallelLinear._forward_impl`). The output layer has no bias, and its input has already been
    gathered."""
    assert bias is None, "an output layer has no bias"
    assert not sequence_parallel, "the hidden states are gathered before the output layer"
    if allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    out: Tensor = _Head.apply(input, weight)
    return out


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        rows = x.flatten(0, -2)
        if x.device.type == "cuda":  # avoids an fp32 copy of the weight
            out = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        else:
            out = rows.float().mm(weight.float().t())
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2).to(weight.dtype)
        to_x = rows.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        to_weight = rows.t().mm(x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return to_x, to_weight
