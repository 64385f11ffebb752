"""Weight gradients that their product adds directly to the fp32 sum, on CUDA in bf16.

Megatron calls a module of Apex for this. torch has the same product: `addmm` of bf16 factors with an fp32 result, for
CUDA only. The tests replace it by plain operations and compare the call.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor


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
