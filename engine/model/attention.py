"""Core attention over a `Layout`: scaled-dot-product attention on CPU, by segment or with one mask.

Slots into Megatron's layer specification in place of its DotProductAttention. The layout travels in Megatron's own
`packed_seq_params` argument, so that activation recomputation and pipelines see the right one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from engine.model.layout import Layout

CALL_COST = 8000
"""Entries of the S×S mask whose computation costs as much as one more call of the kernel (measured on CPU)."""


@dataclass
class LayoutParams(PackedSeqParams):
    """Carries a layout through Megatron's layers; keeps the [s, b, h] format, so nothing else changes its ways."""

    layout: Layout | None = None


def params(layout: Layout) -> LayoutParams:
    """The `packed_seq_params` of a forward over this layout."""
    return LayoutParams(qkv_format="sbhd", layout=layout)


class SegmentAttention(torch.nn.Module):
    """Megatron core attention: query [S, 1, heads, d], key and value [S, 1, key-value heads, d] → [S, 1, heads·d]."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: LayoutParams,
        **unused: Any,  # noqa: ANN401
    ) -> Tensor:
        """Attend over the layout in `packed_seq_params`; the mask argument of Megatron stays unused."""
        layout = packed_seq_params.layout
        assert layout is not None, "SegmentAttention needs a layout: pass packed_seq_params=params(layout)"
        q, k, v = (x.squeeze(1).transpose(0, 1) for x in (query, key, value))
        attend = by_segment if layout.size**2 > CALL_COST * len(layout.batches) else masked
        out = attend(q, k, v, layout, self.scale)
        return out.transpose(0, 1).reshape(query.shape[0], 1, -1)


def masked(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """The reference: one call with the layout's mask. q [heads, S, d], k and v [key-value heads, S, d] → [heads, S, d]."""
    return _sdpa(q[None], k[None], v[None], layout.mask, scale)[0]


def by_segment(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """Same result and shapes as `masked`, computing only what is visible: each prompt once, each response on its own."""
    parts = []
    for batch in layout.batches:
        queries, keys, values = _pick(q, batch.queries), _pick(k, batch.keys), _pick(v, batch.keys)
        parts.append(_sdpa(queries, keys, values, batch.mask, scale).transpose(0, 1).flatten(1, 2))
    return torch.cat(parts, dim=1).index_select(1, layout.order)


def _pick(x: Tensor, positions: Tensor) -> Tensor:
    """[heads, S, d] at positions [n, s] → [n, heads, s, d]."""
    heads, _, dim = x.shape
    return x.index_select(1, positions.flatten()).view(heads, *positions.shape, dim).transpose(0, 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Causal attention (or under a mask) of [n, heads, s, d], with fewer key-value heads where grouped."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
