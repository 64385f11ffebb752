"""Attention on an Ascend NPU: the fused kernel `npu_fusion_attention` of torch_npu, with the parts of the row as
variable-length sequences.

A row is a prompt followed by its responses; prompt and responses are its parts. For each part the keys and values of
its prompt are gathered, then those of its own tokens. Tensors have the layout "TND" (tokens, heads, width), with
cumulative lengths. `sparse_mode` 3 is causal, aligned at the lower right corner: a query sees all keys of the prompt,
and the keys of its own part up to its own position. It needs a 2048×2048 upper triangle as mask. The arguments follow
the documentation in torch_npu 2.10.0.post4 (`_op_plugin_docs.py`).

The tests call an operator with the published schema, which they implement on the CPU. This has not run on an NPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from engine.model.layout import Layout, Part

RIGHT_DOWN_CAUSAL = 3
"""`sparse_mode` for a mask that is causal from the lower right corner."""
MASK_SIZE = 2048
"""Side of the compressed mask that every `sparse_mode` but 0 and 1 takes."""
MOST_PARTS = 1024
"""Largest number of variable-length sequences in one call."""


@dataclass(frozen=True)
class Call:
    """One call of the kernel: consecutive parts, and the keys of each part one after another."""

    first: int
    """Number of the first query among the layout's rows."""
    queries: list[int]
    """Number of queries up to and including each part."""
    keys: list[int]
    """Number of keys up to and including each part."""
    positions: Tensor
    """[keys] position of each key in the whole row."""


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """Same result and shapes as `reference.masked`."""
    hidden = _upper_triangle(q.device)
    done = []
    for call in layout.once(calls):
        done.append(
            torch.ops.npu.npu_fusion_attention(
                q[call.first : call.first + call.queries[-1]],
                k.index_select(0, call.positions),
                v.index_select(0, call.positions),
                q.shape[1],
                "TND",
                atten_mask=hidden,
                scale=q.shape[-1] ** -0.5 if scale is None else scale,
                actual_seq_qlen=call.queries,
                actual_seq_kvlen=call.keys,
                sparse_mode=RIGHT_DOWN_CAUSAL,
            )[0]
        )
    return torch.cat(done)


def calls(layout: Layout) -> list[Call]:
    """The layout's parts in the order of their rows, in as few calls as the kernel allows."""
    parts = layout.parts
    chunks = [parts[at : at + MOST_PARTS] for at in range(0, len(parts), MOST_PARTS)]
    return [_call(chunk, layout.rows.device) for chunk in chunks]


def _call(parts: tuple[Part, ...], device: torch.device) -> Call:
    return Call(
        first=parts[0].query,
        queries=list(accumulate(part.length for part in parts)),
        keys=list(accumulate(part.prefix + part.length for part in parts)),
        positions=torch.cat([part.keys for part in parts]).to(device),
    )


@cache
def _upper_triangle(device: torch.device) -> Tensor:
    """[2048, 2048] bool mask, True = hidden."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)
