"""verl's best@k and maj@k: the figures of k responses drawn with replacement from the k that were sampled.

They are lower than pass@k and maj@k, which use the k responses as they are. verl estimates both from 1,000 draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS = 10_000
"""Number of draws for a problem's maj@k. Its standard error is at most 0.005."""


def best_of(values: Sequence[float]) -> float:
    """Expected largest of k values drawn with replacement from these k: Σ v_(i) · ((i/k)^k − ((i−1)/k)^k) over the
    values in ascending order. verl's best@k/mean estimates this value."""
    k = len(values)
    return sum(value * ((rank / k) ** k - ((rank - 1) / k) ** k) for rank, value in enumerate(sorted(values), 1))


def majority_of(counts: Sequence[int], right: int | None) -> float:
    """Mean value of the majority among k answers drawn with replacement from k, over `DRAWS` seeded draws.

    `counts`: the number of responses with each answer; `right`: the index of the right one, None if no response has it.
    The value is 1/t if the right answer is among t answers at the top. verl takes the one that was drawn first; among
    equals, each is first with the same probability.
    """
    if right is None:
        return 0.0
    total = sum(counts)
    drawn = np.random.default_rng(0).multinomial(total, np.array(counts) / total, size=DRAWS)
    top = drawn == drawn.max(axis=1, keepdims=True)
    return float((top[:, right] / top.sum(axis=1)).mean())
