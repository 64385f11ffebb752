"""Keys and values of the running responses (one slot each) and of recent prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16
"""Slots grow, and attention reads them, in multiples of so many tokens."""


class KeyValueCache:
    """Keys and values [layers, slots, kv heads, dim, capacity]; the capacity doubles when a response outgrows it.

    Tokens come last because decoding multiplies a query or two of a head with all of its tokens: so both products run
    along them, which takes half the time of [capacity, dim] (measured, heads of 16).
    """

    def __init__(self, layers: int, slots: int, kv_heads: int, head_dim: int, capacity: int) -> None:
        # zeros, not empty: what stands behind a mask is multiplied by 0, which only works for finite numbers
        self.keys = torch.zeros(layers, slots, kv_heads, head_dim, capacity)
        self.values = torch.zeros_like(self.keys)

    @property
    def capacity(self) -> int:
        """Tokens that fit in a slot."""
        return self.keys.shape[4]

    def reserve(self, length: int, limit: int) -> None:
        """Make every slot hold `length` tokens; more are reserved, up to `limit`, so that this is rare."""
        if length <= self.capacity:
            return
        room = min(max(length, 2 * self.capacity), limit) - self.capacity
        self.keys, self.values = (torch.nn.functional.pad(x, (0, room)) for x in (self.keys, self.values))

    def fill(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Start a slot with a prompt's keys and values [layers, kv heads, dim, length]."""
        length = keys.shape[3]
        self.keys[:, slot, :, :, :length] = keys
        self.values[:, slot, :, :, :length] = values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot over another."""
        self.keys[:, target, :, :, :length] = self.keys[:, source, :, :, :length]
        self.values[:, target, :, :, :length] = self.values[:, source, :, :, :length]

    def clear(self) -> None:
        """Zero everything."""
        self.keys.zero_()
        self.values.zero_()


@dataclass(frozen=True)
class Prefill:
    """A computed prompt: keys and values [layers, kv heads, dim, length], logits [vocabulary] of what follows it."""

    keys: Tensor
    values: Tensor
    logits: Tensor


class PromptCache:
    """Recently computed prompts by their ids, at most `limit` tokens in all: a group's requests share one prefill."""

    def __init__(self, compute: Callable[[list[int]], tuple[Tensor, Tensor, Tensor]], limit: int) -> None:
        self.compute = compute
        self.limit = limit
        self.computed = 0
        """How many prompts were computed since the start."""
        self._kept: dict[tuple[int, ...], Prefill] = {}

    def get(self, prompt: tuple[int, ...]) -> Prefill:
        """The prompt's prefill, computed unless kept."""
        found = self._kept.pop(prompt, None)
        if found is None:
            found = Prefill(*self.compute(list(prompt)))
            self.computed += 1
        self._kept[prompt] = found  # last = most recently used
        while len(self._kept) > 1 and sum(map(len, self._kept)) > self.limit:
            del self._kept[next(iter(self._kept))]
        return found

    def clear(self) -> None:
        """Forget all prompts; needed whenever the weights change."""
        self._kept.clear()
