"""Attention with a shared prompt, computed in two parts that are merged, without copying the prompt for each response.

A query sees its own run up to itself and, after the first response, the whole prompt before the run.
Each part is one call of a kernel that takes sequences of variable length:

- own part: every `Part` of the row with the keys of its run, causal from the lower right corner. Keys and values of
  the whole row are read in place; a shard gathers those that its queries see.
- prompt part: the queries that see a prompt, with the prompt's keys, without a mask. A prompt is one sequence for all
  of its responses. With one group nothing is gathered; with several groups the prompts and their queries are gathered
  once.

Every kernel returns the lse = log Σ exp(scores) of its part. The results are merged as

    lse = log Σ exp(lseᵢ),  out = Σ exp(lseᵢ − lse) outᵢ,

on a CPU in single operations, on CUDA in compiled ones, on an NPU by its operator.

The backward pass of a part gets the *merged* lse and out. A key's probability is exp(score − lse), and the gradient of
a score is that probability times (grad·v − grad·out): with the merged values each part's gradients are those of the
whole softmax (FlashAttention-2, arXiv:2307.08691 §3.1), and they are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.model import npu_operators
from engine.model.fusion import can_fuse, compile_once
from engine.model.layout import Layout

Where = slice | Tensor
"""Some tokens of a tensor's first dimension: a slice if they are contiguous, else their positions [n]."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of one call. Their queries are contiguous, and so are their keys."""

    queries: tuple[int, ...]
    """Number of queries of each sequence."""
    keys: tuple[int, ...]
    """Number of keys of each sequence; at least as many as queries if causal."""
    causal: bool
    """Whether the last query sees all keys and each earlier one sees one key less; else all queries see all keys."""
    device: torch.device
    """Device of the call's tensors."""

    @cached_property
    def query_offsets(self) -> Tensor:
        """[n + 1] int32: first query of each sequence, then the total."""
        return self._offsets(self.queries)

    @cached_property
    def key_offsets(self) -> Tensor:
        """[n + 1] int32: first key of each sequence, then the total."""
        return self._offsets(self.keys)

    def _offsets(self, lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)

    def split(self, most: int) -> Iterator[tuple[slice, slice, Sequences]]:
        """Yield (queries, keys, sequences) of calls with at most `most` sequences each."""
        query = 0
        key = 0
        for at in range(0, len(self.queries), most):
            some = Sequences(self.queries[at : at + most], self.keys[at : at + most], self.causal, self.device)
            rows = slice(query, query + sum(some.queries))
            keys = slice(key, key + sum(some.keys))
            yield rows, keys, some
            query = rows.stop
            key = keys.stop


class VarlenKernel(Protocol):
    """A kernel for sequences of variable length, constructed with the scale of the scores: q [T, heads, d]; k, v [K,
    key-value heads, d]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Return (out [T, heads, d], lse [T, heads] in fp32 or wider). The caller may write to both."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v for the gradient of `out`, with the given out and lse, which may be those
        of a softmax over more keys than k."""
        ...


@dataclass(frozen=True)
class Call:
    """One call of the kernel."""

    queries: Where
    """Positions among the layout's rows."""
    keys: Where
    """Positions in the whole row."""
    sequences: Sequences


@dataclass(frozen=True)
class TwoParts:
    """The calls for a layout."""

    own: Call
    """All rows, with the keys of their runs."""
    prompt: Call | None
    """The rows that see a prompt before their run, with the prompts; None if there are none."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    scale: float | None = None,
    *,
    kernel: Callable[[float], VarlenKernel],
) -> Tensor:
    """Same result and shapes as `reference.masked_attention`, by calls of the kernel, which is constructed with the
    scale."""
    made = kernel(q.shape[-1] ** -0.5 if scale is None else scale)
    out: Tensor = _Merged.apply((layout.once(plan), made), q, k, v)
    return out


def plan(layout: Layout) -> TwoParts:
    """Return the calls for the layout or shard."""
    device = layout.rows.device
    parts = layout.parts
    own = Call(
        queries=slice(0, layout.size),
        keys=_where([part.own for part in parts], device),
        sequences=Sequences(
            queries=tuple(part.length for part in parts),
            keys=tuple(part.own[1] for part in parts),
            causal=True,
            device=device,
        ),
    )
    behind = [(part.prompt, part.query, part.length) for part in parts if part.prompt[1]]
    if not behind:
        return TwoParts(own, None)
    prompts = [(prompt, sum(part[2] for part in same)) for prompt, same in groupby(behind, lambda part: part[0])]
    prompt = Call(
        queries=_where([part[1:] for part in behind], device),
        keys=_where([prompt for prompt, _ in prompts], device),
        sequences=Sequences(
            queries=tuple(count for _, count in prompts),
            keys=tuple(prompt[1] for prompt, _ in prompts),
            causal=False,
            device=device,
        ),
    )
    return TwoParts(own, prompt)


def _where(ranges: Sequence[tuple[int, int]], device: torch.device) -> Where:
    """Return the tokens of the ranges (first, count), in this order."""
    if all(sum(one) == following[0] for one, following in pairwise(ranges)):
        return slice(ranges[0][0], sum(ranges[-1]))
    return torch.cat([torch.arange(first, first + count) for first, count in ranges]).to(device)


def merge_part(out: Tensor, lse: Tensor, at: Where, part: tuple[Tensor, Tensor]) -> None:
    """Merge (out [n, heads, d], lse [n, heads]) of a part into those of n tokens of `out` and `lse`, in place. For
    compilation: then each is read and written once, and products and sums stay in registers."""
    part_out, part_lse = part
    own_lse = lse[at]
    merged = torch.logaddexp(own_lse, part_lse)
    own_share, part_share = ((one - merged).exp()[..., None] for one in (own_lse, part_lse))
    out[at] = (out[at] * own_share + part_out * part_share).to(out.dtype)
    lse[at] = merged


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: tuple[TwoParts, VarlenKernel], *inputs: Tensor) -> Tensor:  # noqa: ANN401
        plan, kernel = how
        q, k, v = inputs
        own = plan.own
        out, lse = kernel.forward(q[own.queries], k[own.keys], v[own.keys], own.sequences)
        if prompt := plan.prompt:
            at = prompt.queries
            part = kernel.forward(q[at], k[prompt.keys], v[prompt.keys], prompt.sequences)
            if npu_operators.on_npu(out):
                out[at], lse[at] = npu_operators.merge_parts((out[at], lse[at]), part)
            else:
                (compile_once(merge_part) if can_fuse(out) else merge_part)(out, lse, at, part)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.how = how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:  # noqa: ANN401
        q, k, v, out, lse = ctx.saved_tensors
        plan, kernel = ctx.how
        grads: list[Tensor] = []
        for call in (plan.own, plan.prompt):
            if call is None:
                continue
            found = kernel.backward(
                grad=grad.contiguous()[call.queries],
                q=q[call.queries],
                k=k[call.keys],
                v=v[call.keys],
                out=out[call.queries],
                lse=lse[call.queries],
                sequences=call.sequences,
            )
            places = (call.queries, call.keys, call.keys)
            if grads:
                for total, where, part in zip(grads, places, found, strict=True):
                    _add(total, where, part)
            else:
                grads = [
                    _in_place(part, where, len(x)) for part, where, x in zip(found, places, (q, k, v), strict=True)
                ]
        dq, dk, dv = grads
        return None, dq, dk, dv


def _in_place(part: Tensor, where: Where, size: int) -> Tensor:
    """Return the gradient of x[where] as a gradient of x, whose first dimension has `size` tokens."""
    if isinstance(where, slice) and where == slice(0, size):
        return part
    total = part.new_zeros(size, *part.shape[1:])
    _add(total, where, part)
    return total


def _add(total: Tensor, where: Where, part: Tensor) -> None:
    if isinstance(where, slice):
        total[where].add_(part)
    else:
        total.index_add_(0, where, part)
