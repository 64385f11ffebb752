"""Micro-batches of native length (not padded to a common length): where each token is placed, what it may see, and
which positions are scored.

A micro-batch is one row of tokens made of *segments*: a prompt once, then any number of its responses (Periodic
Asynchrony §4.2, eq. 10–11). With the shared prompt turned off, every response is a separate segment. The only padding
is that of `aligned`: sequence and context parallelism split the row evenly, so it may need some filler tokens.

Under context parallelism each rank computes a *shard* of the row: its queries are local, keys and values are those of
the whole row. The row is split into 2·size chunks, and rank r computes chunks r and 2·size−1−r (zigzag). Under a causal
mask early tokens see little and late ones much, so the two chunks together cost every rank about the same.

The *rows* of a `Layout` are the S tokens computed on this rank; the *whole row* is the whole micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

FILLER = 0
"""Token id of the filler. Any id that exists in every vocabulary would do, because its output is never used."""

NOTHING = torch.zeros(0, dtype=torch.long)

Tokens = Sequence[int] | Tensor
"""Token ids, [tokens] on the host."""

Derived = TypeVar("Derived")
Piece = TypeVar("Piece", Tokens, Tensor)


@dataclass(frozen=True)
class Segment:
    """A prompt of `prompt` tokens that begins at position `start`, then its responses, given by length (tokens, may be
    0)."""

    start: int
    prompt: int
    responses: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of tokens of the segment."""
        return self.prompt + sum(self.responses)


@dataclass(frozen=True)
class Part:
    """Consecutive queries of one run of tokens. Each query sees the prompt before the run, and the run up to itself.

    A prompt and its first response are one run (plain causal attention). Every other response is a separate run, with
    the prompt before it.
    """

    query: int
    """Index of the first query among the layout's rows."""
    length: int
    """L, the number of queries."""
    prompt: tuple[int, int]
    """(first position in the whole row, tokens) of the prompt before the run; (0, 0) if the run begins with the
    prompt."""
    own: tuple[int, int]
    """(first position in the whole row, tokens up to the last query) of the run; the last L tokens are the queries."""

    @property
    def start(self) -> int:
        """First position of the part's segment."""
        return self.prompt[0] if self.prompt[1] else self.own[0]

    @property
    def prefix(self) -> int:
        """P, the number of keys that all queries see."""
        return self.prompt[1] + self.own[1] - self.length

    @property
    def keys(self) -> Tensor:
        """[P + L] positions of the keys in the whole row. The last L belong to the queries themselves, which see them
        causally."""
        return torch.cat([torch.arange(start, start + count) for start, count in (self.prompt, self.own)])


@dataclass(frozen=True, eq=False)
class Layout:
    """One micro-batch, or the shard of it that one context-parallel rank computes.

    This rank computes S rows and scores T response tokens; the whole row has `row_size` tokens. `segments` and
    `lengths` describe the whole micro-batch on every rank; all other fields describe the shard.
    """

    token_ids: Tensor
    """[S] int64 id of each row's token."""
    positions: Tensor
    """[S] int64 position of each row for the rotary embedding; each response continues after its prompt (eq. 11)."""
    segments: tuple[Segment, ...]
    """Segments of the whole row. Filler is also a segment, a prompt without responses."""
    scored: Tensor
    """[T] index of the row whose logits score the token. The last row of a prompt scores a response's first token."""
    targets: Tensor
    """[T] id of each scored response token, response after response."""
    lengths: tuple[int, ...]
    """[R] tokens of each response of the whole micro-batch. Without sharding they sum to T."""
    rows: Tensor
    """[S] position of each row in the whole row, ascending."""
    kept: Tensor
    """[T] index of each scored token among all response tokens of the micro-batch, ascending."""
    shards: int = 1
    """Number of context-parallel ranks that the row is split over."""
    routes: Tensor | None = None
    """[S, layers with experts, experts per token] int16: the experts that must compute each row; negative where the
    router chooses. None: the router always chooses (engine.model.routing)."""

    @property
    def size(self) -> int:
        """S, the number of rows computed on this rank."""
        return int(self.token_ids.numel())

    @property
    def row_size(self) -> int:
        """Number of tokens of the whole row."""
        return self.segments[-1].start + self.segments[-1].length

    def aligned(self, multiple: int) -> Layout:
        """Return the same micro-batch, with filler at its end so that S is a multiple of `multiple`. Raises ValueError
        for a shard that would need filler."""
        missing = -self.size % multiple
        if not missing:
            return self
        if self.shards > 1:
            raise ValueError("a shard can't be aligned: align the whole layout, then shard it")
        at = torch.arange(missing, device=self.token_ids.device)
        return replace(
            self,
            token_ids=torch.cat([self.token_ids, torch.full_like(at, FILLER)]),
            positions=torch.cat([self.positions, at]),
            segments=(*self.segments, Segment(self.size, missing, ())),
            rows=torch.cat([self.rows, at + self.size]),
            routes=None if self.routes is None else F.pad(self.routes, (0, 0, 0, 0, 0, missing), value=-1),
        )

    def shard(self, rank: int, size: int) -> Layout:
        """Return the shard that context-parallel rank `rank` of `size` computes. Raises ValueError unless S is a
        multiple of 2·size (`aligned`), and for a layout that is already a shard."""
        if size == 1:
            return self
        if self.shards > 1 or self.size % (2 * size):
            raise ValueError(f"{self.size} rows in {self.shards} shards can't be cut into 2·{size} even chunks")
        rows = zigzag_positions(self.size, rank, size).to(self.token_ids.device)
        place = torch.full_like(self.rows, -1)
        place[rows] = torch.arange(rows.numel(), device=rows.device)
        here = place[self.scored]
        kept = (here >= 0).nonzero().flatten()
        return replace(
            self,
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            scored=here[kept],
            targets=self.targets[kept],
            rows=rows,
            kept=kept,
            shards=size,
            routes=None if self.routes is None else self.routes[rows],
        )

    def to(self, device: torch.device) -> Layout:
        """Return the same layout with its tensors on the device."""
        if device == self.rows.device:
            return self
        tensors = ["token_ids", "positions", "scored", "targets", "rows", "kept"]
        tensors += ["routes"] if self.routes is not None else []
        moved = replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in tensors})
        vars(moved)["parts"] = self.parts  # computed from the rows on the host, to save a wait for the device
        return moved

    def once(self, make: Callable[..., Derived], *arguments: int) -> Derived:
        """Return `make(self, *arguments)`, computed at the first call and then cached. A kernel thus computes what it
        derives from the layout once for all layers."""
        kept: dict[tuple[Any, ...], Derived] = vars(self).setdefault("derived", {})
        key = (make, *arguments)
        if key not in kept:
            kept[key] = make(self, *arguments)
        return kept[key]

    @cached_property
    def row_order(self) -> Tensor:
        """[row_size] index of each token of the whole row in the concatenation of all shards' rows."""
        ranks = [zigzag_positions(self.row_size, rank, self.shards) for rank in range(self.shards)]
        return torch.cat(ranks).argsort().to(self.token_ids.device)

    @cached_property
    def real(self) -> Tensor:
        """[S] bool, whether each row is a token of a prompt or response. The others are filler."""
        sizes = torch.tensor([span.length for span in self.segments])
        answered = torch.tensor([bool(span.responses) for span in self.segments])
        return answered.repeat_interleave(sizes).to(self.rows.device)[self.rows]

    @cached_property
    def membership(self) -> tuple[Tensor, Tensor]:
        """([row_size] index of each token's segment, [row_size] 0 for a prompt token, k for a token of the k-th
        response)."""
        segment = []
        part = []
        for number, span in enumerate(self.segments):
            segment += [number] * span.length
            part += [k for k, length in enumerate((span.prompt, *span.responses)) for _ in range(length)]
        device = self.rows.device
        return torch.tensor(segment, device=device), torch.tensor(part, device=device)

    @cached_property
    def mask(self) -> Tensor:
        """[S, row_size] bool, True = may see. A row sees, up to itself, its segment's prompt and its own response
        (Figure 2)."""
        return self.visible(self.rows, torch.arange(self.row_size, device=self.rows.device))

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[q, k] bool, whether a query may see a key. `queries` [q] and `keys` [k] are positions in the whole row."""
        segment, part = self.membership
        query = queries[:, None]
        own = (part[keys] == 0) | (part[query] == part[keys])
        return (segment[query] == segment[keys]) & own & (keys <= query)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of this rank's rows, in row order."""
        found: list[Part] = []
        place = 0
        for first, last in self._contiguous_ranges():
            for prompt, start, end in self._runs():
                a = max(first, start)
                b = min(last, end)
                if a < b:
                    found.append(Part(place, b - a, prompt, (start, b - start)))
                    place += b - a
        return tuple(found)

    def _contiguous_ranges(self) -> list[tuple[int, int]]:
        """Return the contiguous ranges [first, end) of the whole row that this rank computes."""
        cuts = [0, *((self.rows.diff() != 1).nonzero().flatten() + 1).tolist(), self.size]
        rows = self.rows.tolist()
        return [(rows[a], rows[b - 1] + 1) for a, b in zip(cuts, cuts[1:], strict=False)]

    def _runs(self) -> Iterator[tuple[tuple[int, int], int, int]]:
        """Yield (prompt before it as (first position, tokens), first position, end) of every run of the whole row."""
        for span in self.segments:
            first, *others = [length for length in span.responses if length] or [0]
            at = span.start + span.prompt + first
            yield (0, 0), span.start, at
            for length in others:
                yield (span.start, span.prompt), at, at + length
                at += length


def zigzag_positions(size: int, rank: int, ranks: int) -> Tensor:
    """[size / ranks] positions that one rank computes: chunks `rank` and 2·ranks−1−rank of 2·ranks."""
    if ranks == 1:
        return torch.arange(size)
    chunks = torch.arange(size).view(2 * ranks, -1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def make_layout(
    groups: Sequence[tuple[Tokens, Sequence[Tokens]]],
    shared_prompt: bool = True,
    routes: Sequence[tuple[Tensor, Sequence[Tensor]]] = (),
) -> Layout:
    """Lay out (prompt ids, responses' ids) pairs as one micro-batch, on the host. Every prompt needs at least one
    token. `routes`: the routes of the same tokens (`Layout.routes`), for all groups or for none."""
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    scored: list[Tensor] = []
    targets: list[Tensor] = []
    segments: list[Segment] = []
    at = 0
    chosen = [span for group in routes for span in _by_segment(group, shared_prompt)]
    for prompt, responses in (span for group in groups for span in _by_segment(group, shared_prompt)):
        count = len(prompt)
        last = at + count - 1
        segments.append(Segment(at, count, tuple(map(len, responses))))
        ids.append(_ids(prompt))
        positions.append(torch.arange(count))
        at += count
        for response in map(_ids, responses):
            ids.append(response)
            targets.append(response)
            positions.append(torch.arange(count, count + len(response)))
            before = torch.arange(at - 1, at + len(response) - 1)
            before[:1] = last
            scored.append(before)
            at += len(response)
    return Layout(
        token_ids=torch.cat(ids),
        positions=torch.cat(positions),
        segments=tuple(segments),
        scored=torch.cat([NOTHING, *scored]),
        targets=torch.cat([NOTHING, *targets]),
        lengths=tuple(length for segment in segments for length in segment.responses),
        rows=torch.arange(at),
        kept=torch.arange(sum(map(len, targets))),
        routes=torch.cat([part for prompt, own in chosen for part in (prompt, *own)]) if routes else None,
    )


def _ids(tokens: Tokens) -> Tensor:
    return tokens.long() if isinstance(tokens, Tensor) else torch.tensor(tokens, dtype=torch.long)


def _by_segment(group: tuple[Piece, Sequence[Piece]], shared: bool) -> list[tuple[Piece, Sequence[Piece]]]:
    """Return the group's (prompt, responses) segments: one for all responses, or one for each."""
    prompt, responses = group
    return [group] if shared or not responses else [(prompt, [response]) for response in responses]


def split_responses(prompt: int, responses: Sequence[int], budget: int, shared_prompt: bool = True) -> list[list[int]]:
    """Split a group's responses (given by length) into micro-batches of at most `budget` tokens, including the prompt.

    Returns lists of response indices, in order. A single response above the budget is placed alone. The split depends
    only on lengths, so the same group is always split in the same way.
    """
    batches: list[list[int]] = [[]]
    used = prompt if shared_prompt else 0
    for index, length in enumerate(responses):
        cost = length if shared_prompt else prompt + length
        if batches[-1] and used + cost > budget:
            batches.append([])
            used = prompt if shared_prompt else 0
        batches[-1].append(index)
        used += cost
    return batches
