"""The experts of a mixture: on a device one product of all experts at once, where the platform has a kernel for it.

Megatron's `SequentialMLP` starts the kernels of an MLP for each expert, of which a rank may have 128. Its grouped
layers need Transformer Engine or another package, and keep the weights under other names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.model import npu_operators

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [T, k], weights [experts, k, n], ends [experts] int32: the first token after each expert's → [T, n]."""
LINEARS = ("linear_fc1", "linear_fc2")
"""The names of an expert's two linear maps."""
CUDA_MULTIPLE = 8
"""Sizes of matrices that CUDA's grouped product takes in bf16: rows begin at multiples of 16 bytes."""


def product_for(x: Tensor, *sizes: int) -> Product | None:
    """The platform's grouped product of x's dtype for weights of these sizes; None if it has none."""
    if npu_operators.on_npu(x):
        return npu_operators.grouped_matmul
    if x.is_cuda and x.dtype is torch.bfloat16 and not any(size % CUDA_MULTIPLE for size in sizes):
        return _by_torch
    return None


def _by_torch(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weights, offs=ends)


class GroupedExperts(SequentialMLP):
    """Megatron's experts, with its parameters and their names. On a CPU, and where there is no grouped product, they
    are computed one after the other, as Megatron does."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [T, hidden] in the order of the experts, the number of each expert's, and the router's shares [T] →
        ([T, hidden], None: there is no bias)."""
        x = permuted_local_hidden_states
        first, second = ([getattr(one, name).weight for one in self.local_experts] for name in LINEARS)
        product = product_for(x, *first[0].shape, *second[0].shape)
        if product is None or len(first) == 1 or not len(x):
            found: tuple[Tensor, Tensor | None] = super().forward(x, tokens_per_expert, permuted_probs)
            return found
        sizes = tokens_per_expert.tolist()
        inner = self.activate(grouped(product, sizes, x, first), permuted_probs)
        return grouped(product, sizes, inner, second), None

    def activate(self, joint: Tensor, shares: Tensor) -> Tensor:
        """SwiGLU of all experts, [T, 2·f] → [T, f], times the router's shares [T]."""
        inner: Tensor = self.local_experts[0].activation_func(joint)
        return (inner * shares.unsqueeze(-1)).to(inner.dtype)


def grouped(product: Product, sizes: Sequence[int], x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x [T, k], of which `sizes` tokens belong to each expert, and the experts' weights, each [n, k] → [T, n]."""
    out: Tensor = _Grouped.apply(product, sizes, x, *weights)
    return out


class _Grouped(torch.autograd.Function):
    """The kernels take the weights in one tensor. It is made for each product, and not kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, product: Product, sizes: Sequence[int], x: Tensor, *weights: Tensor) -> Tensor:  # noqa: ANN401
        ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=x.device)
        ctx.save_for_backward(x, ends, *weights)
        ctx.how = product, sizes
        return product(x, torch.stack(weights).transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, ends, *weights = ctx.saved_tensors
        product, sizes = ctx.how
        grad = grad.contiguous()
        to_x = product(grad, torch.stack(weights), ends) if ctx.needs_input_grad[2] else None
        needed = any(ctx.needs_input_grad[3:])
        return None, None, to_x, *(_weight_gradients(grad, x, ends, sizes) if needed else [None] * len(weights))


def _weight_gradients(grad: Tensor, x: Tensor, ends: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """gradᵀ · x [n, k] of each expert's tokens. torch_npu's manual has no grouped product over the tokens of two
    factors, so that there is one product for each expert there."""
    if npu_operators.on_npu(x):
        return [upper.t().mm(one) for upper, one in zip(grad.split(list(sizes)), x.split(list(sizes)), strict=True)]
    return list(F.grouped_mm(grad.t(), x, offs=ends).unbind())
