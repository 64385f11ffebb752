"""Attention on an Ascend NPU: the fused kernel `npu_fusion_attention` of torch_npu, called once for the responses' own
tokens and once for the prompts (`engine.model.kernels.merged`).

Tensors have the layout "TND" (tokens, heads, width), with cumulative lengths. `sparse_mode` 3 is causal, aligned at the
lower right corner; it needs a 2048×2048 upper triangle as mask. Without a mask a query sees all keys of its sequence.
The kernel returns each query's largest score and sum of exponentials; `softmax_layout` "TND" puts them in the order of
the queries. `npu_fusion_attention_grad` takes both, and computes p = exp(score − max) / sum from them. With the merged
lse as the largest score and 1 as the sum, these are the probabilities of the merged softmax. torch_npu's own context
parallelism passes merged values in the same way. The arguments follow torch_npu 2.10.0.post4 (`_op_plugin_docs.py`).

The tests call CPU implementations of these operators with the published schemas. This has not run on an NPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engine.model.kernels.merged import Sequences
from engine.model.kernels.merged import attend as merge
from engine.model.layout import Layout

RIGHT_DOWN_CAUSAL = 3
"""`sparse_mode` for a causal mask aligned at the lower right corner."""
MASK_SIZE = 2048
"""Side of the compressed mask that every `sparse_mode` except 0 and 1 takes."""
MOST_SEQUENCES = 1024
"""Largest number of variable-length sequences in one call."""
COPIES = 8
"""Number of times the kernel repeats each query's largest score and sum."""


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """Same result and shapes as `reference.masked_attention`, also for shards."""
    return merge(q, k, v, layout=layout, scale=scale, kernel=FusionAttention)


@dataclass(frozen=True)
class FusionAttention:
    """torch_npu's kernel as a `merged.VarlenKernel`."""

    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """See `merged.VarlenKernel`."""
        done = []
        for rows, keys, some in sequences.split(MOST_SEQUENCES):
            out, largest, total = torch.ops.npu.npu_fusion_attention(
                query=q[rows], key=k[keys], value=v[keys], head_num=q.shape[1], scale=self.scale, **_options(some)
            )[:3]
            done.append((out, largest[..., 0] + total[..., 0].log()))
        out, lse = (_joined(parts) for parts in zip(*done, strict=True))
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `merged.VarlenKernel`."""
        largest = lse[..., None].expand(-1, -1, COPIES).contiguous()
        done = [
            torch.ops.npu.npu_fusion_attention_grad(
                query=q[rows],
                key=k[keys],
                value=v[keys],
                dy=grad[rows],
                head_num=q.shape[1],
                softmax_max=largest[rows],
                softmax_sum=torch.ones_like(largest[rows]),
                attention_in=out[rows],
                scale_value=self.scale,
                **_options(some),
            )[:3]
            for rows, keys, some in sequences.split(MOST_SEQUENCES)
        ]
        dq, dk, dv = (_joined(parts) for parts in zip(*done, strict=True))
        return dq, dk, dv


def _options(sequences: Sequences) -> dict[str, Any]:
    """Return the arguments that both operators share."""
    causal = sequences.causal
    return {
        "input_layout": "TND",
        "atten_mask": _upper_triangle(sequences.device) if causal else None,
        "sparse_mode": RIGHT_DOWN_CAUSAL if causal else 0,
        "actual_seq_qlen": list(accumulate(sequences.queries)),
        "actual_seq_kvlen": list(accumulate(sequences.keys)),
        "softmax_layout": "TND",
    }


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@cache
def _upper_triangle(device: torch.device) -> Tensor:
    """[2048, 2048] bool mask, True = hidden."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)
