"""CPU: torch's attention on the parts of the row by themselves, so that next to nothing hidden is computed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from engine.model.kernels.reference import sdpa
from engine.model.layout import Layout, Part

CALL_COST = 250_000
"""Entries of the mask times width of all heads whose computation costs as much as one
more call of the kernel (measured)."""


@dataclass(frozen=True)
class AttentionCall:
    """One call: n times L queries, each of which sees some of their K keys."""

    queries: Tensor
    """[n, L] places among the layout's rows."""
    keys: Tensor
    """[n, K] positions in the whole row."""
    mask: Tensor | None
    """[L, K] bool, True = may see; None is plain causal (L = K)."""


@dataclass(frozen=True)
class Plan:
    """The calls for a layout. Queries and keys of all of them are gathered at once;
    None where they are in place already."""

    batches: tuple[AttentionCall, ...]
    queries: Tensor | None
    """[S] the rows in the order of the batches."""
    keys: Tensor | None
    """The keys in the order of the batches."""
    order: Tensor | None
    """[S] where each row stands in that order."""


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """Same result and shapes as `reference.masked`, by the calls that should take least time."""
    return _run(q=q, k=k, v=v, plan=layout.once(plan, CALL_COST // (q.shape[1] * q.shape[2])), scale=scale)


def by_segment(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """`attend` as if calls were free: only what is visible is computed."""
    return _run(q=q, k=k, v=v, plan=layout.once(plan, 0), scale=scale)


def _run(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None) -> Tensor:
    queries = _gather(q, plan.queries).split([batch.queries.numel() for batch in plan.batches])
    keys, values = (_gather(x, plan.keys).split([batch.keys.numel() for batch in plan.batches]) for x in (k, v))
    done = []
    for batch, *inputs in zip(plan.batches, queries, keys, values, strict=True):
        query, key, value = (x.unflatten(0, (batch.queries.shape[0], -1)) for x in inputs)
        done.append(sdpa(q=query, k=key, v=value, mask=batch.mask, scale=scale).flatten(0, 1))
    return _gather(torch.cat(done) if len(done) > 1 else done[0], plan.order)


def _gather(x: Tensor, positions: Tensor | None) -> Tensor:
    return x if positions is None else x.index_select(0, positions)


def plan(layout: Layout, call_cost: int) -> Plan:
    """Parts of one shape as one batch; but where the calls would cost more than they save, a block under a mask.

    `call_cost` is in entries of the mask.
    """
    blocks: list[tuple[Part, ...]] = []
    apart: list[tuple[Part, ...]] = []
    for block in _merged([tuple(parts) for _, parts in groupby(layout.parts, lambda part: part.start)], call_cost):
        (blocks if len(block) > 1 and _as_block(block, call_cost) < _as_parts(block, call_cost) else apart).append(
            block
        )
    shapes: dict[tuple[int, int], list[Part]] = {}
    for part in (part for parts in apart for part in parts):
        shapes.setdefault((part.prefix, part.length), []).append(part)
    batches = (
        *(_block(layout, parts) for parts in blocks),
        *(_batch(parts, layout.rows.device) for parts in shapes.values()),
    )
    queries = torch.cat([batch.queries.flatten() for batch in batches])
    keys = torch.cat([batch.keys.flatten() for batch in batches])
    moved = _unless_in_place(queries, layout.size)
    return Plan(batches, moved, _unless_in_place(keys, layout.row_size), None if moved is None else queries.argsort())


def _unless_in_place(positions: Tensor, size: int) -> Tensor | None:
    in_place = positions.numel() == size and bool((positions == torch.arange(size, device=positions.device)).all())
    return None if in_place else positions


def _merged(segments: list[tuple[Part, ...]], call_cost: int) -> list[tuple[Part, ...]]:
    """Neighbouring segments' parts together where one block of them costs less than each by itself."""
    merged = segments[:1]
    for parts in segments[1:]:
        apart = sum(min(_as_block(block, call_cost), _as_parts(block, call_cost)) for block in (merged[-1], parts))
        if _as_block(merged[-1] + parts, call_cost) < apart:
            merged[-1] += parts
        else:
            merged.append(parts)
    return merged


def _as_parts(parts: tuple[Part, ...], call_cost: int) -> int:
    shapes = {(part.prefix, part.length) for part in parts}
    return sum(part.length * (part.prefix + part.length) for part in parts) + call_cost * len(shapes)


def _as_block(parts: tuple[Part, ...], call_cost: int) -> int:
    (query, last), (key, end) = _extent(parts)
    return (last - query) * (end - key) + call_cost


def _extent(parts: tuple[Part, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """First and end of the parts' consecutive rows, and of the keys that any of them sees."""
    last = parts[-1]
    return (parts[0].query, last.query + last.length), (
        min(part.start for part in parts),
        max(sum(part.own) for part in parts),
    )


def _block(layout: Layout, parts: tuple[Part, ...]) -> AttentionCall:
    queries, keys = (torch.arange(*extent, device=layout.rows.device) for extent in _extent(parts))
    return AttentionCall(queries[None], keys[None], layout.visible(layout.rows[queries], keys))


def _batch(parts: list[Part], device: torch.device) -> AttentionCall:
    length = parts[0].length
    prefix = parts[0].prefix
    queries = torch.tensor([part.query for part in parts])[:, None] + torch.arange(length)
    keys = torch.stack([part.keys for part in parts])
    mask = torch.ones(length, prefix + length, dtype=torch.bool).tril(diagonal=prefix).to(device) if prefix else None
    return AttentionCall(queries.to(device), keys.to(device), mask)
