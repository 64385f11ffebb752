"""Core attention over a `Layout`, computed by a platform's kernel.

It replaces DotProductAttention in Megatron's layer specification. The layout is passed in Megatron's
`packed_seq_params` argument, so that activation recomputation and pipelines get the right one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from engine.errors import BadInput
from engine.model.kernels import KERNELS
from engine.model.layout import Layout


@dataclass
class LayoutParams(PackedSeqParams):
    """Carries a layout through Megatron's layers. The format stays [s, b, h], so nothing else in Megatron changes."""

    layout: Layout | None = None


def attention_params(layout: Layout) -> LayoutParams:
    """Return the `packed_seq_params` for a forward pass over this layout."""
    return LayoutParams(qkv_format="sbhd", layout=layout)


class SegmentAttention(torch.nn.Module):
    """Megatron core attention: query [S, 1, heads, d], key and value [S, 1, key-value heads, d] → [S, 1, heads·d].

    The heads are those of this tensor rank, the S rows those of this context rank. Under context parallelism, keys and
    values of the whole row are gathered from the group, and their gradients are summed over it.
    """

    def __init__(
        self,
        config: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        kernel: str = "cpu",
        softmax_scale: float | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """`kernel` is a key of KERNELS. The other arguments are Megatron's; only `softmax_scale` is used."""
        super().__init__()
        self.kernel = KERNELS[kernel]
        self.scale = softmax_scale

    @classmethod
    def backend(cls, name: str) -> Callable[..., SegmentAttention]:
        """Return a constructor of this module with the kernel `name`, for Megatron's layer specification. Raises
        BadInput if the kernel is unknown."""
        if name not in KERNELS:
            raise BadInput(f'attention backend "{name}" is unknown, expected one of {", ".join(sorted(KERNELS))}')
        return partial(cls, kernel=name)

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
        """Attend over the layout in `packed_seq_params`. Megatron's mask argument is ignored. Raises ValueError without
        a layout, and for a layout sharded for another number of context-parallel ranks."""
        layout = packed_seq_params.layout
        if layout is None:
            raise ValueError("SegmentAttention needs a layout: pass packed_seq_params=attention_params(layout)")
        key, value = whole_row(key, value, layout)
        out = self.kernel(query.squeeze(1), key.squeeze(1), value.squeeze(1), layout, self.scale)
        return out.reshape(query.shape[0], 1, -1)


def whole_row(key: Tensor, value: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return keys and values of the whole row [row_size, ...], in order, from those of this context-parallel rank [S,
    ...]. Collective over the context-parallel group."""
    ranks = parallel_state.get_context_parallel_world_size() or 1  # 0 without a process group
    if layout.shards != ranks:
        raise ValueError(
            f"the layout is spread over {layout.shards} ranks, but the context-parallel group has {ranks} ranks"
        )
    if ranks == 1:
        return key, value
    both = torch.cat([key, value], dim=-1)
    gathered = gather_from_sequence_parallel_region(both, group=parallel_state.get_context_parallel_group())
    row = gathered.index_select(0, layout.row_order)
    return row[..., : key.shape[-1]], row[..., key.shape[-1] :]
