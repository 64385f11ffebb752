"""Keys and values of the running responses (one slot each) and of recent prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16
"""Slots grow, and attention reads them, in multiples of this number of tokens."""


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
        self.keys, self.values = (torch.nn.functional.pad(x, (0, room)) for x in (self.keys, self.values))

    def fill(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Write a prompt's keys and values [layers, kv heads, dim, length] to the start of a slot."""
        length = keys.shape[3]
        self.keys[:, slot, :, :, :length] = keys
        self.values[:, slot, :, :, :length] = values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to slot `target`."""
        self.keys[:, target, :, :, :length] = self.keys[:, source, :, :, :length]
        self.values[:, target, :, :, :length] = self.values[:, source, :, :, :length]

    def clear_slots(self) -> None:
        """Set all keys and values to zero."""
        self.keys.zero_()
        self.values.zero_()


@dataclass(frozen=True)
class Prefill:
    """A computed prompt, or a piece of one: keys and values [layers, kv heads, dim, length], and the logits
    [vocabulary] of the next token."""

    keys: Tensor
    values: Tensor
    logits: Tensor


def join_pieces(pieces: Sequence[Prefill]) -> Prefill:
    """Return the prompt that consists of these pieces, at least one."""
    if len(pieces) == 1:
        return pieces[0]
    keys, values = (torch.cat(parts, 3) for parts in zip(*((one.keys, one.values) for one in pieces), strict=True))
    return Prefill(keys, values, pieces[-1].logits)


Compute = Callable[[list[int], Prefill | None], tuple[Tensor, Tensor, Tensor]]
"""Computes a piece (`RolloutModel.prefill`): (its tokens, the tokens before it) -> its keys and values, and the logits
after it."""


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

    def get_prefill(self, prompt: tuple[int, ...]) -> Prefill:
        """Return the prompt's prefill, computing those of its pieces that are not cached."""
        size = self.piece or len(prompt)
        pieces: dict[tuple[int, ...], Prefill] = {}
        for begin in range(0, len(prompt), size):
            key = prompt[: begin + size]
            found = self._kept.pop(key, None)
            if found is None:
                before = join_pieces([*pieces.values()]) if pieces else None
                found = Prefill(*self.compute(list(key[begin:]), before))
                self.computed += before is None
            pieces[key] = found
        self._kept.update(reversed(pieces.items()))  # a prompt's end is dropped first: without its begin it is no use
        self._forget_oldest()
        return join_pieces([*pieces.values()])

    def _forget_oldest(self) -> None:
        total = sum(piece.keys.shape[3] for piece in self._kept.values())
        while len(self._kept) > 1 and total > self.limit:
            total -= self._kept.pop(next(iter(self._kept))).keys.shape[3]

    def drop_prompts(self) -> None:
        """Drop all prompts. Required whenever the weights change."""
        self._kept.clear()
