"""Keys and values of the running responses (one slot each) and of recent prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne

import torch
from torch import Tensor

BLOCK = 16
"""Slots grow, and attention reads them, in multiples of this number of tokens."""
TOGETHER = 1024
"""Most tokens of several turns that are computed together."""


@dataclass(frozen=True)
class Prefill:
    """A computed prompt, or a piece of one: keys and values [layers, kv heads, dim, length], and the logits
    [vocabulary] of the next token; None where they were not kept."""

    keys: Tensor
    values: Tensor
    logits: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.keys.shape[3]

    def begin(self, length: int) -> Prefill:
        """Return the first `length` tokens, which may be all."""
        if length == self.length:
            return self
        return Prefill(self.keys[..., :length], self.values[..., :length])


class KeyValueCache:
    """Keys and values [layers, slots, kv heads, dim, capacity]. The capacity doubles when a response outgrows it.

    Tokens are the last dimension because decoding multiplies one or two queries per head with all tokens of a slot.
    Both products then run along the tokens, which takes half the time of [capacity, dim] (measured, heads of 16).
    """

    def __init__(self, layers: int, slots: int, kv_heads: int, head_dim: int, capacity: int) -> None:
        # zeros, not empty: masked entries are multiplied by 0, which gives 0 for finite numbers only
        self.keys = torch.zeros(layers, slots, kv_heads, head_dim, capacity)
        self.values = torch.zeros_like(self.keys)

    @property
    def capacity(self) -> int:
        """Tokens that fit in a slot."""
        return self.keys.shape[4]

    def reserve(self, length: int, limit: int) -> None:
        """Grow every slot to at least `length` tokens. The capacity doubles where `limit` allows, so that slots rarely
        grow."""
        if length <= self.capacity:
            return
        room = min(max(length, 2 * self.capacity), limit) - self.capacity
        self.keys = torch.nn.functional.pad(self.keys, (0, room))  # one after the other: less memory at once
        self.values = torch.nn.functional.pad(self.values, (0, room))

    def fill(self, slot: int, pieces: Sequence[Prefill]) -> None:
        """Write the pieces of a prompt to the start of a slot."""
        begin = 0
        for piece in pieces:
            end = begin + piece.length
            self.keys[:, slot, :, :, begin:end] = piece.keys
            self.values[:, slot, :, :, begin:end] = piece.values
            begin = end

    def read(self, slot: int, length: int) -> Prefill:
        """Return a copy of the first `length` tokens of a slot, without logits."""
        return Prefill(self.keys[:, slot, :, :, :length].clone(), self.values[:, slot, :, :, :length].clone())

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to slot `target`."""
        self.keys[:, target, :, :, :length] = self.keys[:, source, :, :, :length]
        self.values[:, target, :, :, :length] = self.values[:, source, :, :, :length]

    def clear_slots(self) -> None:
        """Set all keys and values to zero."""
        self.keys.zero_()
        self.values.zero_()


def join_pieces(pieces: Sequence[Prefill]) -> Prefill:
    """Return the prompt that consists of these pieces, at least one."""
    if len(pieces) == 1:
        return pieces[0]
    keys, values = (torch.cat(parts, 3) for parts in zip(*((one.keys, one.values) for one in pieces), strict=True))
    return Prefill(keys, values, pieces[-1].logits)


Piece = tuple[Sequence[int], Prefill | None]
"""Tokens to compute, and what stands before them."""
Compute = Callable[[Sequence[Piece]], list[Prefill]]
"""Computes pieces together (`RolloutModel.prefill`)."""


class PromptCache:
    """Recently computed prompts, so that the requests of a group share one prefill and, with `piece`, the turns of a
    conversation share what stands before them.

    With `piece` a prompt is computed in pieces of this many tokens and a shorter last one, each from the tokens before
    it. Its bits then depend on nothing but its tokens, whether pieces of it were kept or not. The cache keeps at most
    `limit` tokens in total, but always the most recently used piece.
    """

    def __init__(self, compute: Compute, limit: int, piece: int = 0) -> None:
        """`piece`: 0 computes a prompt in one piece."""
        self.compute = compute
        self.limit = limit
        self.piece = piece
        self.computed = 0
        """Number of prompts computed from their first token since the start."""
        self._kept: dict[tuple[int, ...], Prefill] = {}
        """By all tokens up to its end: a piece. The last is the most recently used one."""

    def get_prefills(self, prompts: Sequence[tuple[int, ...]]) -> list[list[Prefill]]:
        """Return the pieces of each prompt, the last one with logits, computing those that are not cached."""
        return [self._get_prefill(prompt) for prompt in prompts]

    def _get_prefill(self, prompt: tuple[int, ...]) -> list[Prefill]:
        size = self.piece or len(prompt)
        pieces: dict[tuple[int, ...], Prefill] = {}
        for begin in range(0, len(prompt), size):
            key = prompt[: begin + size]
            kept = self._kept.pop(key, None)
            pieces[key] = kept if kept is not None else self._compute(key[begin:], [*pieces.values()])
        self._kept.update(reversed(pieces.items()))  # a prompt's end is dropped first: without its begin it is no use
        self._forget_oldest()
        return [*pieces.values()]

    def _compute(self, tokens: tuple[int, ...], before: Sequence[Prefill]) -> Prefill:
        self.computed += not before
        return self.compute([(tokens, join_pieces(before) if before else None)])[0]

    def _forget_oldest(self) -> None:
        total = sum(piece.length for piece in self._kept.values())
        while len(self._kept) > 1 and total > self.limit:
            total -= self._kept.pop(next(iter(self._kept))).length

    def drop_prompts(self) -> None:
        """Drop all prompts. Required whenever the weights change."""
        self._kept.clear()


class ConversationCache(PromptCache):
    """A cache that keeps what responses have computed, too: a turn computes only the tokens that no kept prompt or
    response begins with.

    The bits of a turn then depend on what was kept. A deterministic engine uses `PromptCache` with pieces instead.
    """

    def get_prefills(self, prompts: Sequence[tuple[int, ...]]) -> list[list[Prefill]]:
        """Return each prompt in one or two parts, the last one with logits. What follows kept tokens is computed
        together."""
        parts: dict[tuple[int, ...], list[Prefill]] = {}
        rest: dict[tuple[int, ...], tuple[tuple[int, ...], Prefill]] = {}
        again: list[tuple[int, ...]] = []
        """Prompts that may come again as they are."""
        for prompt in dict.fromkeys(prompts):
            known = self._kept.pop(prompt, None)
            if known is not None:
                self._kept[prompt] = known
            longest, shared = self._find_begin(prompt)
            if known is not None and known.logits is not None:
                parts[prompt] = [known]
            elif shared < BLOCK:
                self._kept[prompt] = whole = self._compute(prompt, [])
                parts[prompt] = [whole]
            else:
                kept = self._kept.pop(longest)
                rest[prompt] = prompt[shared:], kept.begin(shared)
                if shared < len(longest) or kept.logits is not None:  # else a response, which goes on as this one
                    self._kept[longest] = kept
                    again.append(prompt)
        for prompt, computed in zip(rest, self._compute_together([*rest.values()]), strict=True):
            parts[prompt] = [rest[prompt][1], computed]
        self._kept.update((prompt, join_pieces(parts[prompt])) for prompt in again)
        self._forget_oldest()
        return [parts[prompt] for prompt in prompts]

    def _compute_together(self, pieces: Sequence[Piece]) -> Iterator[Prefill]:
        """Compute pieces, TOGETHER tokens at a time or one longer piece."""
        begin = 0
        while begin < len(pieces):
            end = begin + 1
            while end < len(pieces) and sum(len(tokens) for tokens, _ in pieces[begin : end + 1]) <= TOGETHER:
                end += 1
            yield from self.compute(pieces[begin:end])
            begin = end

    def _find_begin(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Return the kept tokens that begin as the prompt does for longest, and how many of them do: less than all of
        the prompt's, because the logits after its last one must be computed."""
        longest: tuple[int, ...] = ()
        shared = 0
        for key in self._kept:
            limit = min(len(key), len(prompt) - 1)
            if limit > shared and key[shared] == prompt[shared]:
                same = next(compress(count(), map(ne, key[:limit], prompt)), limit)
                if same > shared:
                    longest = key
                    shared = same
        return longest, shared

    def keep_response(self, prompt: tuple[int, ...], tokens: Sequence[int], computed: Prefill) -> None:
        """Keep `computed`, a prompt and the tokens of a response to it, in place of the prompt alone."""
        self._kept.pop(prompt, None)
        self._kept[(*prompt, *tokens)] = computed
        self._forget_oldest()
