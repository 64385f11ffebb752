"""Micro-batches of native length: which tokens stand where, what each may see, and which positions are scored.

A micro-batch is one row of tokens made of *segments*: a prompt once, then any number of its responses (Periodic
Asynchrony §4.2, eq. 10–11). With the shared prompt switched off every response is a segment of its own. No padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """A prompt of `prompt` tokens from `start` on, followed by responses of the given lengths (tokens, may be 0)."""

    start: int
    prompt: int
    responses: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of the segment."""
        return self.prompt + sum(self.responses)


@dataclass(frozen=True)
class Layout:
    """One micro-batch. S tokens in all, T of them response tokens to be scored, R responses."""

    token_ids: Tensor
    """[S] int64."""
    positions: Tensor
    """[S] int64; each response continues after its prompt (eq. 11)."""
    segments: tuple[Segment, ...]
    scored: Tensor
    """[T] positions in the row whose logits score the response tokens; a first token is scored by its prompt's last."""
    targets: Tensor
    """[T] the response tokens themselves, response after response."""
    lengths: tuple[int, ...]
    """[R] tokens of each response; their sum is T."""

    @property
    def size(self) -> int:
        """S."""
        return int(self.token_ids.numel())

    @cached_property
    def mask(self) -> Tensor:
        """[S, S] bool, True = may see: causal, inside the segment, own response and the prompt only (Figure 2)."""
        segment = torch.empty(self.size, dtype=torch.long)
        part = torch.zeros(self.size, dtype=torch.long)  # 0 = prompt, k = k-th response
        for number, span in enumerate(self.segments):
            segment[span.start : span.start + span.length] = number
            at = span.start + span.prompt
            for k, length in enumerate(span.responses, start=1):
                part[at : at + length] = k
                at += length
        same = segment[:, None] == segment[None, :]
        visible = (part[None, :] == 0) | (part[:, None] == part[None, :])
        return same & visible & torch.ones(self.size, self.size, dtype=torch.bool).tril()

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """The row's parts (prompts, responses) by shape: parts of one shape are computed as a batch, nothing is padded."""
        parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for span in self.segments:
            parts.setdefault((0, span.prompt), []).append((span.start, span.start))
            at = span.start + span.prompt
            for length in span.responses:
                if length:
                    parts.setdefault((span.prompt, length), []).append((span.start, at))
                at += length
        return tuple(_batch(prompt, length, members) for (prompt, length), members in parts.items())

    @cached_property
    def order(self) -> Tensor:
        """[S] where each token stands in the concatenation of all batches' queries."""
        return torch.cat([batch.queries.flatten() for batch in self.batches]).argsort()


@dataclass(frozen=True)
class Batch:
    """Parts of one shape: n queries of length L, each behind a prompt of P tokens that it sees (P = 0: a prompt itself)."""

    queries: Tensor
    """[n, L] positions in the row."""
    keys: Tensor
    """[n, P + L] positions in the row."""
    mask: Tensor | None
    """[L, P + L] bool, True = may see; None is plain causal."""


def _batch(prompt: int, length: int, members: list[tuple[int, int]]) -> Batch:
    prompts, starts = (torch.tensor(column)[:, None] for column in zip(*members, strict=True))
    queries = starts + torch.arange(length)
    if not prompt:
        return Batch(queries, queries, None)
    mask = torch.ones(length, prompt + length, dtype=torch.bool).tril(diagonal=prompt)
    return Batch(queries, torch.cat([prompts + torch.arange(prompt), queries], dim=1), mask)


def layout(groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], shared_prompt: bool = True) -> Layout:
    """Lay out (prompt ids, responses' ids) pairs as one micro-batch; every prompt needs at least one token."""
    spans = [(prompt, part) for prompt, responses in groups for part in _parts(responses, shared_prompt)]
    ids: list[int] = []
    positions: list[int] = []
    scored: list[int] = []
    targets: list[int] = []
    segments: list[Segment] = []
    for prompt, responses in spans:
        start, last = len(ids), len(ids) + len(prompt) - 1
        ids += prompt
        positions += range(len(prompt))
        for response in responses:
            first = len(ids)
            ids += response
            positions += range(len(prompt), len(prompt) + len(response))
            scored += ([last] + list(range(first, first + len(response) - 1))) if response else []
            targets += response
        segments.append(Segment(start, len(prompt), tuple(len(response) for response in responses)))
    return Layout(
        token_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        segments=tuple(segments),
        scored=torch.tensor(scored, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        lengths=tuple(len(response) for _, responses in spans for response in responses),
    )


def _parts(responses: Sequence[Sequence[int]], shared: bool) -> list[Sequence[Sequence[int]]]:
    return [responses] if shared else [[response] for response in responses]


def split(prompt: int, responses: Sequence[int], budget: int, shared_prompt: bool = True) -> list[list[int]]:
    """Split a group's responses (given by length) into micro-batches of at most `budget` tokens, prompt included.

    Returns lists of response indices, in order. A single response above the budget stands alone. Depends on lengths
    only, so the same group is always split in the same way.
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
