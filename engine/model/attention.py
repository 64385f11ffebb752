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

from engine.model.layout import Layout, Segment

MASK_LIMIT = 1024
"""Up to this many tokens one call with an S×S mask is cheaper than a call per response (measured on CPU)."""


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
        out = masked(q, k, v, layout, self.scale) if layout.size <= MASK_LIMIT else by_segment(q, k, v, layout, self.scale)
        return out.transpose(0, 1).reshape(query.shape[0], 1, -1)


def masked(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """The reference: one call with the layout's mask. q [heads, S, d], k and v [key-value heads, S, d] → [heads, S, d]."""
    return _sdpa(q, k, v, layout.mask, scale)


def by_segment(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """Same result and shapes as `masked`, computing only what is visible: each prompt once, each response on its own."""
    parts = [part for segment in layout.segments for part in _segment(q, k, v, segment, scale)]
    return torch.cat(parts, dim=1)


def _segment(q: Tensor, k: Tensor, v: Tensor, segment: Segment, scale: float | None) -> list[Tensor]:
    at, end = segment.start, segment.start + segment.prompt
    prompt_k, prompt_v = k[:, at:end], v[:, at:end]
    parts = [_sdpa(q[:, at:end], prompt_k, prompt_v, None, scale)]
    for length in segment.responses:
        at, end = end, end + length
        keys = torch.cat([prompt_k, k[:, at:end]], dim=1)
        values = torch.cat([prompt_v, v[:, at:end]], dim=1)
        mask = torch.ones(length, segment.prompt + length, dtype=torch.bool).tril(diagonal=segment.prompt)
        parts.append(_sdpa(q[:, at:end], keys, values, mask, scale))
    return parts


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Causal attention (or under a mask) of [heads, s, d] with grouped key-value heads."""
    grouped = q.shape[0] != k.shape[0]
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out[0]
