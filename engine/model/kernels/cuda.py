"""Attention on CUDA: torch's FlashAttention if it supports the tensors, else FlexAttention.

FlashAttention computes the responses' own tokens and the prompts in one call each (`engine.model.kernels.merged`). The
tests call its operators with CPU implementations behind them.

FlexAttention skips blocks of the mask in which nothing is visible. Each row sees the keys of its own run up to itself,
and the keys of its prompt. So the kernel loads four numbers per query and none per key. It also runs uncompiled on a
CPU, where the tests check it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engine.model.fusion import compile_once
from engine.model.kernels.merged import Sequences
from engine.model.kernels.merged import attend as merge
from engine.model.layout import Layout

FLASH_DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes that FlashAttention supports."""
FLASH_WIDTH = 256
"""Largest head width that FlashAttention supports; it must be a multiple of 8."""
FLASH_CAPABILITY = (8, 0)
"""Lowest compute capability that FlashAttention runs on: Ampere."""
BLOCK = 128
"""Number of queries, and of keys, of a block: FlexAttention's default."""
CHUNK = 16
"""Number of rows of blocks classified at a time, so that the whole mask is never in memory."""


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """Same result and shapes as `reference.masked_attention`, also for shards."""
    if flash_takes(q):
        return merge(q, k, v, layout=layout, scale=scale, kernel=Flash)
    return attend_flex(q, k, v, layout=layout, scale=scale)


def flash_takes(q: Tensor) -> bool:
    """Whether FlashAttention is built for the queries' device and supports their dtype and width. It is not used on
    ROCm, where its lse has another shape."""
    width = q.shape[-1]
    return (
        q.is_cuda
        and q.dtype in FLASH_DTYPES
        and width <= FLASH_WIDTH
        and not width % 8
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(q.device) >= FLASH_CAPABILITY
    )


@dataclass(frozen=True)
class Flash:
    """torch's FlashAttention for sequences of variable length as a `merged.VarlenKernel`. Its causal mask is aligned at
    the lower right corner, and its lse is [heads, T] fp32. torch.nn.attention.varlen calls the same operators."""

    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """See `merged.VarlenKernel`."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query=q, key=k, value=v, return_debug_mask=False, scale=self.scale, **_options(sequences)
        )
        return out, lse.T

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `merged.VarlenKernel`. Without dropout the state of the random generator is not read."""
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out=grad,
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse.T.contiguous(),
            rng_state=torch.zeros(2, dtype=torch.uint64, device=q.device),
            unused=torch.empty(0, device=q.device),
            scale=self.scale,
            **_options(sequences),
        )
        return dq, dk, dv


def _options(sequences: Sequences) -> dict[str, Any]:
    """Return the arguments that both operators share."""
    return {
        "cum_seq_q": sequences.query_offsets,
        "cum_seq_k": sequences.key_offsets,
        "max_q": max(sequences.queries),
        "max_k": max(sequences.keys),
        "dropout_p": 0.0,
        "is_causal": sequences.causal,
    }


def attend_flex(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """Same result and shapes as `reference.masked_attention`. The block mask is built once per layout; the kernel is
    compiled once per process."""
    plain: Callable[..., Any] = flex_attention  # type: ignore[assignment]  # of a type that mypy can't name
    kernel = compile_once(plain) if q.is_cuda else plain
    out: Tensor = kernel(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        block_mask=layout.once(block_mask),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def block_mask(layout: Layout) -> BlockMask:
    """Return the layout's mask in blocks: those partly visible, and those fully visible, where no mask is applied."""
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
    """[q, kv] bool → [blocks of q, blocks of kv, BLOCK²] bool. Entries beyond the mask's edge are not visible."""
    q, kv = mask.shape
    padded = F.pad(mask, (0, -kv % BLOCK, 0, -q % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2).flatten(2)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[q, kv] bool over blocks → ([1, 1, q] number of key blocks that are set for each query block, [1, 1, q, kv]
    indices of these key blocks, then those of the others)."""
    numbers = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], numbers.int()[None, None]


def visible_keys(layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row, own, first, end), [S] int32 each: a row sees the keys own … row and first … end − 1 of the whole row."""
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
