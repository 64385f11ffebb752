"""Fused torch_npu operators for an Ascend NPU: RMSNorm, optionally with the preceding sum, rotation, SwiGLU, the merge
of two parts of attention and the product of all experts. Each replaces several torch operations.

The calls follow the documentation in torch_npu 2.10.0.post4 (`_op_plugin_docs.py`). torch_npu differentiates
`npu_rms_norm` and `npu_swiglu` itself. The other gradients are ours: `engine.model.rotary` has that of the rotation,
which is a rotation, `engine.model.experts` that of the experts' product, `engine.model.kernels.merged` that of merged
attention, and `engine.model.norm` that of the norm with its sum. For `npu_add_rms_norm` and `npu_rms_norm_backward`
torch_npu documents only the signatures; the results of the first are in the order of `npu_add_rms_norm_cast`.

The tests call CPU implementations of these operators with the published schemas. None of them has run on an NPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

ONE_RESULT = 3
"""`split_item` of npu_grouped_matmul: one tensor with the results of all groups."""
BY_ROWS = 0
"""`group_type`: the groups are rows of the first factor."""
WITH_LSE = 1
"""`update_type` of npu_attention_update: also return the merged lse."""
CUMULATIVE = 0
"""`group_list_type`: the group list holds the end of each group."""


def on_npu(x: Tensor) -> bool:
    """Whether the tensor is on an NPU, so that these operators apply to it."""
    return x.device.type == "npu"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dimension. `weight` [hidden] has the dtype of `x`."""
    out: Tensor = torch.ops.npu.npu_rms_norm(x, weight, epsilon=eps)[0]
    return out


def add_rms_norm(a: Tensor, b: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(a + b, `rms_norm` of the sum, 1/rms [..., 1] in fp32), without a gradient."""
    normed, scale, total = torch.ops.npu.npu_add_rms_norm(a, b, weight, epsilon=eps)
    return total, normed, scale


def rms_norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight, given the gradient of `rms_norm` and its 1/rms."""
    to_x, to_weight = torch.ops.npu.npu_rms_norm_backward(grad, x, weight, scale)
    return to_x, to_weight


def npu_rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """t·cos + (−t₂, t₁)·sin with the halves t = (t₁, t₂); t [S, b, heads, d], cos and sin [S, 1, 1, d] in its dtype."""
    out: Tensor = torch.ops.npu.npu_rotary_mul(t, cos, sin)
    return out


def npu_swiglu(joint: Tensor) -> Tensor:
    """silu(gate) · up: [..., 2·f], gate and up side by side → [..., f]."""
    out: Tensor = torch.ops.npu.npu_swiglu(joint, dim=-1)
    return out


def merge_parts(own: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge (out [n, heads, d], lse [n, heads] in fp32) of two parts of a softmax into those of the whole."""
    outs, lses = zip(own, other, strict=True)
    out, lse = torch.ops.npu.npu_attention_update(
        [x.flatten() for x in lses], [x.flatten(0, 1) for x in outs], WITH_LSE
    )
    return out.view_as(outs[0]), lse.view_as(lses[0])


def grouped_matmul(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """x [T, k] · weights [experts, k, n] → [T, n], each expert for its own tokens; `ends` [experts]: the first token
    after each expert's. The weights may be transposed."""
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [x], [weights], group_list=ends.long(), split_item=ONE_RESULT, group_type=BY_ROWS, group_list_type=CUMULATIVE
    )
    found: Tensor = out
    return found
