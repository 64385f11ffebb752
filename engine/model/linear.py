"""Matrix products of Megatron's linear layers on a CPU in fp32: by oneDNN where they are large, else by torch.

torch hands fp32 products to MKL, which takes AVX2 on processors of another maker: half the speed that a core with
AVX-512 has. oneDNN, which torch ships too, asks the processor. Which of the two computes a product depends on its sizes
alone, so equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

LARGE = 1 << 22
"""Multiplications from which oneDNN is worth its setting up,
about 0.6 ms at the first product of some sizes (measured)."""
BLOCK = 128
"""oneDNN gets a multiple of so many tokens, torch the rest: each of its sizes keeps about 0.7 MiB for ever (measured),
and there are as many lengths as micro-batches."""


def install(model: torch.nn.Module) -> None:
    """Let the model's linear layers multiply by `linear`:
    they leave the product to a method that is meant to be replaced."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module._forward_impl = linear


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,  # noqa: ANN401
    **unused: Any,  # noqa: ANN401
) -> Tensor:
    """x [S, b, k] · weightᵀ + bias, weight [n, k] → [S, b, n]. Arguments of Megatron's products.

    The gradient of a weight with a `main_grad` is added to it; autograd gets None.
    """
    if input.dtype is not torch.float32 or input.device.type != "cpu":
        product = (
            linear_with_grad_accumulation_and_async_allreduce if weight.requires_grad else linear_with_frozen_weight
        )
        theirs: Tensor = product(
            input,
            weight,
            bias,
            allreduce_dgrad=allreduce_dgrad,
            sequence_parallel=sequence_parallel,
            tp_group=tp_group,
            **unused,
        )
        return theirs
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    ours: Tensor = _Linear.apply(input, weight, bias)
    return ours


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        ctx.main_grad = getattr(weight, "main_grad", None)
        out = times(x.flatten(0, -2), weight.t())
        if bias is not None:
            out += bias
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        to_x = times(rows, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        to_weight = _to_weight(rows, x.flatten(0, -2), ctx.main_grad) if ctx.needs_input_grad[1] else None
        return to_x, to_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def times(a: Tensor, b: Tensor) -> Tensor:
    """Tokens a [T, k] · b [k, n] → [T, n], fp32 and dense, without gradients."""
    whole = _whole(len(a), b.numel())
    if not whole:
        return a.mm(b)
    first = _by_onednn(a[:whole], b)
    return first if whole == len(a) else torch.cat([first, a[whole:].mm(b)])


def _to_weight(grad: Tensor, x: Tensor, total: Tensor | None) -> Tensor | None:
    """gradᵀ · x of grad [T, n] and x [T, k]; added to `total` [n, k] if there is one, and then None."""
    whole = _whole(len(x), grad.shape[1] * x.shape[1])
    if whole:
        product = _transposed_times(grad[:whole], x[:whole])
        total, found = (product, product) if total is None else (total.add_(product), None)
        total.addmm_(grad[whole:].t(), x[whole:])
        return found
    if total is None:
        return grad.t().mm(x)
    total.addmm_(grad.t(), x)
    return None


def _transposed_times(grad: Tensor, x: Tensor) -> Tensor:
    """gradᵀ · x. oneDNN copies its first factor: the smaller one, unless transposing the result costs more."""
    tokens = len(x)
    outputs = grad.shape[1]
    inputs = x.shape[1]
    if (tokens + 2 * outputs) * inputs < tokens * outputs:
        return _by_onednn(x.t(), grad).t()
    return _by_onednn(grad.t(), x)


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return out


def _whole(tokens: int, each: int) -> int:
    """How many of the tokens go to oneDNN, with so many multiplications for each."""
    whole = tokens - tokens % BLOCK
    return whole if whole * each >= LARGE else 0
