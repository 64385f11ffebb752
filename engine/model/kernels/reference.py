"""The reference that every other kernel is tested against: attention of all rows to all keys under a plain mask."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.model.layout import Layout


def masked_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """Attention of the layout's rows to the whole row, in one call with the layout's mask.

    q [S, heads, d]; k, v [row_size, key-value heads, d], where consecutive query heads share a key-value head → [S,
    heads, d]. `scale` defaults to 1/√d. All kernels in this folder have these arguments and results.
    """
    return torch_attention(q=q[None], k=k[None], v=v[None], mask=layout.mask, scale=scale)[0]


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """torch's attention with tensors [n, s, heads, d], under a [queries, keys] mask (True = may see), or causal without
    a mask → [n, s, heads, d]."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
