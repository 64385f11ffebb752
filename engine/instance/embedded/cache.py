"""Keys and values of the running responses (one slot each) and of recent prompts."""

from __future__ import annotations

from collections.abc import Callable
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
    """A computed prompt: keys and values [layers, kv heads, dim, length], and the logits [vocabulary] of the next
    token."""

    keys: Tensor
    values: Tensor
    logits: Tensor


class PromptCache:
    """Recently computed prompts by their token ids, so that the requests of a group share one prefill.

    It keeps at most `limit` tokens in total, but always the most recently used prompt.
    """

    def __init__(self, compute: Callable[[list[int]], tuple[Tensor, Tensor, Tensor]], limit: int) -> None:
        self.compute = compute
        self.limit = limit
        self.computed = 0
        """Number of prompts computed since the start."""
        self._kept: dict[tuple[int, ...], Prefill] = {}

    def get_prefill(self, prompt: tuple[int, ...]) -> Prefill:
        """Return the prompt's prefill, computing it if it is not cached."""
        found = self._kept.pop(prompt, None)
        if found is None:
            found = Prefill(*self.compute(list(prompt)))
            self.computed += 1
        self._kept[prompt] = found  # last = most recently used
        while len(self._kept) > 1 and sum(map(len, self._kept)) > self.limit:
            del self._kept[next(iter(self._kept))]
        return found

    def drop_prompts(self) -> None:
        """Drop all prompts. Required whenever the weights change."""
        self._kept.clear()
