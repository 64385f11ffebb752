"""The experts of a mixture. On devices whose platform has a kernel for it, one product computes all experts at once.

The kernels take the weights of all experts in one tensor. Work per parameter profits as well: adding, reducing and
measuring its gradient, and updating it in the optimizer. Megatron's `SequentialMLP` has two parameters per expert, and
a rank may have 128 experts. Megatron's grouped layers need Transformer Engine or another package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.model import linear, npu_operators

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [T, k], weights [experts, k, n], ends [experts] int32: the first token after each expert's → [T, n]."""
CUDA_MULTIPLE = 8
"""CUDA's grouped product in bf16 takes matrix sizes that are multiples of this: rows must begin at multiples of 16
bytes."""


def product_for(x: Tensor, *sizes: int) -> Product | None:
    """Return the platform's grouped product for x's dtype and weights of these sizes; None if it has none."""
    if npu_operators.on_npu(x):
        return npu_operators.grouped_matmul
    if x.is_cuda and x.dtype is torch.bfloat16 and not any(size % CUDA_MULTIPLE for size in sizes):
        return _by_torch
    return None


def _by_torch(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weights, offs=ends)


class GroupedExperts(MegatronModule):
    """A rank's experts, replacing Megatron's `SequentialMLP`. Each linear map of all experts is one parameter."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """The arguments are those of Megatron's experts."""
        super().__init__(config)
        inner = config.moe_ffn_hidden_size
        self.linear_fc1 = _weights(config, num_local_experts, 2 * inner, config.hidden_size)
        """[experts, 2·f, hidden]: gate, then up projection."""
        self.linear_fc2 = _weights(config, num_local_experts, config.hidden_size, inner)
        """[experts, hidden, f]."""
        self.activation_func = submodules.activation_func(config)
        self._groups = pg_collection

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [T, hidden] in the order of the experts, the number of each expert's tokens (on the host), and the
        router's shares [T] → ([T, hidden], None: there is no bias)."""
        x = permuted_local_hidden_states
        one = len(self.linear_fc1) == 1 or not len(x)
        product = None if one else product_for(x, *self.linear_fc1.shape[1:], *self.linear_fc2.shape[1:])
        sizes = tokens_per_expert.tolist()
        inner = self.activate(grouped_product(product, sizes, x, self.linear_fc1), permuted_probs)
        return grouped_product(product, sizes, inner, self.linear_fc2), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Return this rank's experts as parts of the experts of all ranks. Megatron calls this to write a
        checkpoint."""
        axis = len(sharded_offsets)
        place = (axis, self._groups.ep.rank(), self._groups.ep.size())
        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                prefix + name,
                parameter,
                *sharded_offsets,
                place,
                replica_id=(0, 0, self._groups.expt_dp.rank()),
                prepend_axis_num=axis,
            )
            for name, parameter in self.named_parameters()
        }

    def activate(self, joint: Tensor, shares: Tensor) -> Tensor:
        """Apply SwiGLU for all experts, [T, 2·f] → [T, f], times the router's shares [T]."""
        inner: Tensor = self.activation_func(joint)
        return (inner * shares.unsqueeze(-1)).to(inner.dtype)


def _weights(config: TransformerConfig, *sizes: int) -> torch.nn.Parameter:
    """Return uninitialised weights, with the marks that Megatron puts on experts.

    `allreduce` says that the ranks with the same experts are the ranks with the same attention. This is false for
    tensor ranks, since each sends its own tokens to its experts. Megatron's layers set the mark only for expert
    parallelism, because by default Megatron splits experts over the same ranks as attention.
    """
    found = torch.nn.Parameter(torch.empty(sizes, dtype=config.params_dtype))
    vars(found)["allreduce"] = config.expert_model_parallel_size * config.tensor_model_parallel_size == 1
    set_tensor_model_parallel_attributes(found, True, 1, 1)
    return found


def grouped_product(product: Product | None, sizes: Sequence[int], x: Tensor, weights: Tensor) -> Tensor:
    """x [T, k], with `sizes` tokens for each expert, and the experts' weights [experts, n, k] → [T, n]. Without a
    `product` the experts are computed one after the other. Their gradients are then added to the weights' `main_grad`,
    if it exists and has their dtype, and autograd gets None."""
    out: Tensor = _Grouped.apply(product, sizes, x, weights)
    return out


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Product | None, sizes: Sequence[int], x: Tensor, weights: Tensor) -> Tensor:  # noqa: ANN401
        ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32).to(x.device, non_blocking=True)
        ctx.save_for_backward(x, ends, weights)
        ctx.how = product, sizes, getattr(weights, "main_grad", None)
        return _times(product=product, sizes=sizes, x=x, weights=weights.transpose(1, 2), ends=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, ends, weights = ctx.saved_tensors
        product, sizes, total = ctx.how
        grad = grad.contiguous()
        to_x = None
        if ctx.needs_input_grad[2]:
            to_x = _times(product=product, sizes=sizes, x=grad, weights=weights, ends=ends)
        if not ctx.needs_input_grad[3]:
            return None, None, to_x, None
        if product is not None and not npu_operators.on_npu(x):
            return None, None, to_x, F.grouped_mm(grad.t(), x, offs=ends)
        add = product is None and total is not None and total.dtype is x.dtype
        return None, None, to_x, _weight_gradients(grad, x, sizes, total if add else None)


def _times(*, product: Product | None, sizes: Sequence[int], x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """x [T, k] and weights [experts, k, n] → [T, n]."""
    if product is not None:
        return product(x, weights, ends)
    return torch.cat([linear.token_product(part, own) for part, own in zip(x.split(list(sizes)), weights, strict=True)])


def _weight_gradients(grad: Tensor, x: Tensor, sizes: Sequence[int], total: Tensor | None) -> Tensor | None:
    """gradᵀ · x of each expert's tokens: [experts, n, k]. If there is a `total`, add it there and return None.

    torch_npu's manual has no grouped product over the tokens of two factors, so there is one product per expert.
    """
    parts = list(zip(grad.split(list(sizes)), x.split(list(sizes)), strict=True))
    if total is not None:
        for (upper, lower), own in zip(parts, total, strict=True):
            linear.weight_gradient(upper, lower, own)
        return None
    found = x.new_empty(len(sizes), grad.shape[1], x.shape[1])
    for (upper, lower), own in zip(parts, found, strict=True):
        own.copy_(upper.t().mm(lower))
    return found
