"""Attention on a CPU: torch's attention, called for parts of the row, so that almost nothing masked is computed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from engine.model.kernels.reference import torch_attention
from engine.model.layout import Layout, Part

CALL_COST = 250_000
"""Cost of one call of the kernel, in mask entries times the width of all heads: computing this many takes as long as a
call (measured)."""
SHORT = 384
"""Most keys of a call that torch computes faster in fp32 than in bf16, conversions included: half the time with 128
keys, the same with 384 (measured)."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of the kernel: n sets of L queries, each with K keys, of which a query sees some."""

    queries: Tensor
    """[n, L] indices of the queries among the layout's rows."""
    keys: Tensor
    """[n, K] positions of the keys in the whole row."""
    mask: Tensor | None
    """[L, K] bool, True = may see; None is plain causal (L = K)."""


@dataclass(frozen=True)
class Plan:
    """The calls for a layout. Queries and keys of all calls are gathered at once."""

    batches: tuple[AttentionCall, ...]
    """The calls. Their queries, concatenated, are a permutation of the rows."""
    queries: Tensor | None
    """[S] indices of the rows in the order of the calls; None if that is the rows' own order."""
    keys: Tensor | None
    """Positions of the keys in the order of the calls; None if that is the whole row in its own order."""
    order: Tensor | None
    """[S] index of each row in the order of the calls; None as for `queries`."""


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """Same result and shapes as `reference.masked_attention`, using the calls estimated to take the least time."""
    return _run_plan(q=q, k=k, v=v, plan=layout.once(plan, CALL_COST // (q.shape[1] * q.shape[2])), scale=scale)


def by_segment(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """`attend` as if calls cost nothing: no parts are joined into a block, so only visible entries are computed."""
    return _run_plan(q=q, k=k, v=v, plan=layout.once(plan, 0), scale=scale)


def _run_plan(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None) -> Tensor:
    queries = _gather(q, plan.queries).split([batch.queries.numel() for batch in plan.batches])
    keys, values = (_gather(x, plan.keys).split([batch.keys.numel() for batch in plan.batches]) for x in (k, v))
    done = []
    for batch, *inputs in zip(plan.batches, queries, keys, values, strict=True):
        query, key, value = (x.unflatten(0, (batch.queries.shape[0], -1)) for x in inputs)
        if q.dtype is torch.bfloat16 and batch.keys.shape[1] <= SHORT:
            query, key, value = (x.float() for x in (query, key, value))
        out = torch_attention(q=query, k=key, v=value, mask=batch.mask, scale=scale)
        done.append(out.flatten(0, 1).to(q.dtype))
    return _gather(torch.cat(done) if len(done) > 1 else done[0], plan.order)


def _gather(x: Tensor, positions: Tensor | None) -> Tensor:
    return x if positions is None else x.index_select(0, positions)


def plan(layout: Layout, call_cost: int) -> Plan:
    """Choose the calls for a layout. Parts of equal shape are computed in one call. Consecutive parts are instead
    joined into one block under a mask if separate calls would cost more than they save.

    `call_cost` is in entries of the mask.
    """
    blocks: list[tuple[Part, ...]] = []
    apart: list[tuple[Part, ...]] = []
    for block in _join_segments(
        [tuple(parts) for _, parts in groupby(layout.parts, lambda part: part.start)], call_cost
    ):
        (blocks if len(block) > 1 and _block_cost(block, call_cost) < _parts_cost(block, call_cost) else apart).append(
            block
        )
    shapes: dict[tuple[int, int], list[Part]] = {}
    for part in (part for parts in apart for part in parts):
        shapes.setdefault((part.prefix, part.length), []).append(part)
    batches = (
        *(_block_call(layout, parts) for parts in blocks),
        *(_batch_call(parts, layout.rows.device) for parts in shapes.values()),
    )
    queries = torch.cat([batch.queries.flatten() for batch in batches])
    keys = torch.cat([batch.keys.flatten() for batch in batches])
    moved = _unless_in_place(queries, layout.size)
    return Plan(batches, moved, _unless_in_place(keys, layout.row_size), None if moved is None else queries.argsort())


def _unless_in_place(positions: Tensor, size: int) -> Tensor | None:
    """Return the positions, or None if they are 0 … size − 1 in this order."""
    in_place = positions.numel() == size and bool((positions == torch.arange(size, device=positions.device)).all())
    return None if in_place else positions


def _join_segments(segments: list[tuple[Part, ...]], call_cost: int) -> list[tuple[Part, ...]]:
    """Return the parts of the segments. Those of neighbouring segments are joined if one block costs less than both
    separately."""
    merged = segments[:1]
    for parts in segments[1:]:
        apart = sum(min(_block_cost(block, call_cost), _parts_cost(block, call_cost)) for block in (merged[-1], parts))
        if _block_cost(merged[-1] + parts, call_cost) < apart:
            merged[-1] += parts
        else:
            merged.append(parts)
    return merged


def _parts_cost(parts: tuple[Part, ...], call_cost: int) -> int:
    """Return the cost in mask entries of one call for each shape among the parts."""
    shapes = {(part.prefix, part.length) for part in parts}
    return sum(part.length * (part.prefix + part.length) for part in parts) + call_cost * len(shapes)


def _block_cost(parts: tuple[Part, ...], call_cost: int) -> int:
    """Return the cost in mask entries of one call for all parts together."""
    (query, last), (key, end) = _extent(parts)
    return (last - query) * (end - key) + call_cost


def _extent(parts: tuple[Part, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return ((first, end) of the parts' consecutive rows, (first, end) of the keys that any of them sees)."""
    last = parts[-1]
    return (parts[0].query, last.query + last.length), (
        min(part.start for part in parts),
        max(sum(part.own) for part in parts),
    )


def _block_call(layout: Layout, parts: tuple[Part, ...]) -> AttentionCall:
    """Return one call for consecutive parts, under the layout's mask."""
    queries, keys = (torch.arange(*extent, device=layout.rows.device) for extent in _extent(parts))
    return AttentionCall(queries[None], keys[None], layout.visible(layout.rows[queries], keys))


def _batch_call(parts: list[Part], device: torch.device) -> AttentionCall:
    """Return one call for parts of equal shape."""
    length = parts[0].length
    prefix = parts[0].prefix
    queries = torch.tensor([part.query for part in parts])[:, None] + torch.arange(length)
    keys = torch.stack([part.keys for part in parts])
    mask = torch.ones(length, prefix + length, dtype=torch.bool).tril(diagonal=prefix).to(device) if prefix else None
    return AttentionCall(queries.to(device), keys.to(device), mask)
