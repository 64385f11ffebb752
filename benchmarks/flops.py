"""Floating-point operations of a training micro-step, counted from the model's sizes; standard library only."""

from __future__ import annotations

from typing import Protocol


class Sizes(Protocol):
    """The sizes of `engine.model.shape.ModelShape` that matter here."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int


def forward(sizes: Sizes, tokens: int, pairs: float, scored: int) -> float:
    """2 · S · (weights of the layers' linear maps) + 4 · A · layers · heads · head_dim + 2 · T · hidden · vocabulary

    for S computed tokens, A visible (query, key) pairs and T scored tokens. A multiply-add is two operations. Norms,
    rotary positions, activations and the softmax are left out; they are a few per cent.
    """
    attention = sizes.hidden * sizes.head_dim * (2 * sizes.heads + 2 * sizes.kv_heads)
    weights = sizes.layers * (attention + 3 * sizes.hidden * sizes.intermediate)
    visible = 4 * pairs * sizes.layers * sizes.heads * sizes.head_dim
    return 2 * tokens * weights + visible + 2 * scored * sizes.hidden * sizes.vocabulary


def micro_step(sizes: Sizes, prompt: int, response: int, group: int, shared: bool) -> float:
    """Operations of forward and backward (twice the forward) of a group whose responses have equal length, without
    recomputation.

    With a prompt of P tokens and G responses of R tokens (Periodic Asynchrony §4.2, eq. 10-13), T = G·R and

        shared    S = P + G·R     A = P(P+1)/2 + G·(R·P + R(R+1)/2)
        separate  S = G·(P + R)   A = G·(P(P+1)/2 + R·P + R(R+1)/2)
    """
    copies = 1 if shared else group
    tokens = copies * prompt + group * response
    pairs = copies * prompt * (prompt + 1) / 2 + group * (response * prompt + response * (response + 1) / 2)
    return 3 * forward(sizes, tokens, pairs, group * response)
