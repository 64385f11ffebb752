"""Matrix products of Megatron's linear layers on a CPU, of the output layer, and of weight gradients that are added to
their fp32 sum.

On a CPU, large products in fp32 are computed by oneDNN, the others by torch, which uses MKL. On non-Intel processors
MKL uses AVX2, which is half as fast as AVX-512 on cores that have it. oneDNN, which is also part of torch, uses the
best instructions of the processor. The choice between the two depends only on the product's sizes, so equal inputs give
equal bits. In bf16 torch itself calls oneDNN.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import layers
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

PIECE = 1 << 21
"""Numbers of a bf16 weight gradient that are computed at a time before they are added to the fp32 sum. The gradient of
an output layer then takes a third of the time of the whole at once (measured): new memory of that size comes from the
system each time."""
PIECE_ELSEWHERE = 1 << 28
"""The same on a device whose products do not add to an fp32 sum, where a piece must be large compared with a launch."""
LARGE = 1 << 22
"""Fewest multiplications of a product that oneDNN computes. Its set-up takes about 0.6 ms at the first product of each
size (measured)."""
BLOCK = 128
"""oneDNN computes a multiple of this many tokens, torch the rest. oneDNN permanently keeps about 0.7 MiB for each size
(measured), and without the multiple there would be as many sizes as micro-batches."""


def install_linear(model: torch.nn.Module) -> None:
    """Make the model's linear layers compute their products with `linear_product`, through the method that Megatron
    provides for this. Does nothing if torch has no oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module._forward_impl = linear_product


def linear_product(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,  # noqa: ANN401
    **unused: Any,  # noqa: ANN401
) -> Tensor:
    """x [S, b, k] · weightᵀ + bias with weight [n, k] → [S, b, n]. The arguments are those of Megatron's products.

    If the weight has a `main_grad`, its gradient is added to that, and autograd gets None.
    """
    if input.dtype not in (torch.float32, torch.bfloat16) or input.device.type != "cpu":
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
        out = token_product(x.flatten(0, -2), weight.t())
        if bias is not None:
            out += bias
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        to_x = token_product(rows, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        to_weight = weight_gradient(rows, x.flatten(0, -2), ctx.main_grad) if ctx.needs_input_grad[1] else None
        return to_x, to_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def token_product(a: Tensor, b: Tensor) -> Tensor:
    """Tokens a [T, k] · b [k, n] → [T, n], contiguous, without gradients."""
    whole = _onednn_tokens(len(a), b.numel()) if _has_onednn(a) else 0
    if not whole:
        return a.mm(b)
    first = _by_onednn(a[:whole], b)
    return first if whole == len(a) else torch.cat([first, a[whole:].mm(b)])


def weight_gradient(grad: Tensor, x: Tensor, total: Tensor | None) -> Tensor | None:
    """gradᵀ · x [n, k] of grad [T, n] and x [T, k]. If there is a `total` [n, k], add the product there and return
    None."""
    whole = _onednn_tokens(len(x), grad.shape[1] * x.shape[1]) if _has_onednn(x) else 0
    if whole:
        product = _transposed_times(grad[:whole], x[:whole])
        total, found = (product, product) if total is None else (total.add_(product), None)
        total.addmm_(grad[whole:].t(), x[whole:])
        return found
    if total is None:
        return grad.t().mm(x)
    if total.dtype is x.dtype:
        total.addmm_(grad.t(), x)
        return None
    if can_fuse_gradients(x.device, x.dtype):
        Accumulation.wgrad_gemm_accum_fp32(x, grad, total)
        return None
    rows = max(1, (PIECE if x.device.type == "cpu" else PIECE_ELSEWHERE) // x.shape[1])
    for some, part in zip(total.split(rows), grad.split(rows, dim=1), strict=True):
        some += part.t().mm(x)
    return None


def _transposed_times(grad: Tensor, x: Tensor) -> Tensor:
    """gradᵀ · x. oneDNN copies its first factor, so the smaller one goes first, unless transposing the result would
    cost more."""
    tokens = len(x)
    outputs = grad.shape[1]
    inputs = x.shape[1]
    if (tokens + 2 * outputs) * inputs < tokens * outputs:
        return _by_onednn(x.t(), grad).t()
    return _by_onednn(grad.t(), x)


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return out


def _has_onednn(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.device.type == "cpu" and torch.backends.mkldnn.is_available()


def _onednn_tokens(tokens: int, each: int) -> int:
    """Return the number of tokens that oneDNN computes, the first ones; `each`: multiplications per token."""
    whole = tokens - tokens % BLOCK
    return whole if whole * each >= LARGE else 0


def output_product(x: Tensor, weight: Tensor, wide: bool) -> Tensor:
    """Logits x [T, k] · weightᵀ with weight [n, k] → [T, n], without gradients. `wide`: in fp32 for bf16 factors.

    bf16 logits near 20 are 1/8 apart, which accounts for most of the difference between two correct engines. The
    factors stay bf16; their products are summed, and kept, in fp32.
    """
    if not wide or x.dtype is not torch.bfloat16:
        return token_product(x, weight.t())
    if x.device.type == "cuda":  # avoids an fp32 copy of the weight
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float().mm(weight.float().t())


# weight gradients that their product adds directly to the fp32 sum, on CUDA in bf16
# Megatron calls a module of Apex for this. torch has the same product: `addmm` of bf16 factors with an fp32 result, for
# CUDA only. The tests replace it by plain operations and compare the call.


def can_fuse_gradients(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has the product for the device and the dtype of the model."""
    return device.type == "cuda" and torch.version.hip is None and dtype is torch.bfloat16


def install_fused_gradients() -> None:
    """Give Megatron's linear layers this product, under the name of Apex's module."""
    vars(layers).update(fused_weight_gradient_mlp_cuda=Accumulation, _grad_accum_fusion_available=True)


class Accumulation:
    """The part of Apex's `fused_weight_gradient_mlp_cuda` that Megatron calls."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: Tensor, grad: Tensor, total: Tensor) -> None:
        """Add gradᵀ · x, of x [T, k] and grad [T, n] in bf16, to `total` [n, k] in fp32."""
        torch.addmm(total, grad.t(), x, out_dtype=torch.float32, out=total)
