"""Core attention over a `Layout`: scaled-dot-product attention on CPU, by segment or with one mask.

Slots into Megatron's layer specification in place of its DotProductAttention. The layout travels in Megatron's own
`packed_seq_params` argument, so that activation recomputation and pipelines see the right one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from engine.model.layout import Layout, Segment

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
        attend = by_segment if layout.size**2 > CALL_COST * _calls(layout) else masked
        out = attend(q, k, v, layout, self.scale)
        return out.transpose(0, 1).reshape(query.shape[0], 1, -1)


def _calls(layout: Layout) -> int:
    """Kernel calls of `by_segment`."""
    return sum(1 + len(set(segment.responses)) for segment in layout.segments)


def masked(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """The reference: one call with the layout's mask. q [heads, S, d], k and v [key-value heads, S, d] → [heads, S, d]."""
    return _sdpa(q[None], k[None], v[None], layout.mask, scale)[0]


def by_segment(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """Same result and shapes as `masked`, computing only what is visible: each prompt once, each response on its own."""
    parts = [part for segment in layout.segments for part in _segment(q, k, v, segment, scale)]
    return torch.cat(parts, dim=1)


def _segment(q: Tensor, k: Tensor, v: Tensor, segment: Segment, scale: float | None) -> list[Tensor]:
    """Outputs of a segment's parts in their order; responses of one length are one batch, so nothing is padded."""
    end = segment.start + segment.prompt
    prompt = slice(segment.start, end)
    starts = list(accumulate(segment.responses, initial=end))[:-1]
    parts: dict[int, Tensor] = {}
    for length in set(segment.responses):
        members = [number for number, other in enumerate(segment.responses) if other == length]
        queries, keys, values = (torch.stack([x[:, starts[m] : starts[m] + length] for m in members]) for x in (q, k, v))
        keys, values = (
            torch.cat([x[:, prompt].expand(len(members), -1, -1, -1), own], dim=2) for x, own in ((k, keys), (v, values))
        )
        mask = torch.ones(length, segment.prompt + length, dtype=torch.bool).tril(diagonal=segment.prompt)
        parts.update(zip(members, _sdpa(queries, keys, values, mask, scale), strict=True))
    first = _sdpa(q[None, :, prompt], k[None, :, prompt], v[None, :, prompt], None, scale)[0]
    return [first, *(parts[number] for number in range(len(segment.responses)))]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Causal attention (or under a mask) of [n, heads, s, d], with fewer key-value heads where grouped."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
