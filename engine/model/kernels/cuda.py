"""CUDA: FlexAttention under a block mask, which skips the blocks of the mask in which nothing is visible.

The mask is described by what each row sees: the keys from its own run's first to itself, and those of its prompt. So
the kernel loads four numbers per query and none per key. Runs uncompiled on a CPU too, where the tests compare it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engine.model.layout import Layout

BLOCK = 128
"""Queries and keys of a block: FlexAttention's default."""
CHUNK = 16
"""Rows of blocks classified at a time, so that the mask is never there as a whole."""
VARIANTS = 32
"""Compiled kernels at most."""


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """Same result and shapes as `reference.masked`.
    The block mask is made once per layout, the kernel once per process."""
    out = _flex(q.is_cuda)(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        block_mask=layout.once(block_mask),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


@cache
def _flex(compiled: bool) -> Callable[..., Tensor]:
    """Compiled for any length. fullgraph: rather an error than the uncompiled kernel, which computes the whole S×S.

    A few variants are compiled all the same (rows of one block, with and without gradient); torch gives up after 8.
    """
    if not compiled:
        return flex_attention
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def block_mask(layout: Layout) -> BlockMask:
    """The layout's mask in blocks: which are partly visible, and which wholly, so that no mask is applied in them."""
    row, own, first, end = visible_keys(layout)

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((kv >= own[q]) & (kv <= row[q])) | ((kv >= first[q]) & (kv < end[q]))

    some = []
    whole = []
    keys = torch.arange(layout.row_size, device=row.device)
    for queries in torch.arange(layout.size, device=row.device).split(CHUNK * BLOCK):
        blocks = _blocks(visible(queries, queries, queries[:, None], keys))
        some.append(blocks.any(-1))
        whole.append(blocks.all(-1))
    partly = torch.cat(some)
    wholly = torch.cat(whole)
    return BlockMask.from_kv_blocks(
        *_listed(partly & ~wholly),
        *_listed(wholly),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(layout.size, layout.row_size),
    )


def _blocks(mask: Tensor) -> Tensor:
    """[q, kv] → [blocks of q, blocks of kv, BLOCK²]; what lies beyond the edge is not visible."""
    q, kv = mask.shape
    padded = F.pad(mask, (0, -kv % BLOCK, 0, -q % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2).flatten(2)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[q, kv] bool → per block of queries how many blocks of keys [1, 1, q],
    and which, then the other ones [1, 1, q, kv]."""
    numbers = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], numbers.int()[None, None]


def visible_keys(layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What each row sees of the whole row, [S] int32 each: the keys own..row and first..end−1."""
    own = []
    first = []
    end = []
    for part in layout.parts:
        own += [part.own[0]] * part.length
        first += [part.prompt[0]] * part.length
        end += [sum(part.prompt)] * part.length

    def column(bound: list[int]) -> Tensor:
        return torch.tensor(bound, dtype=torch.int32, device=layout.rows.device)

    return layout.rows.int(), column(own), column(first), column(end)
