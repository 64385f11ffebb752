"""Shaping of rewards by the response's length, and the test whether rewards are equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # takes seconds to import, which a comparison of scores does not need

ROUNDING = 1e-6
"""Rewards are equal if they differ by at most this fraction of the largest magnitude. Summing the same terms in another
order causes a smaller difference."""


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal up to rounding: their spread is at most ROUNDING of the largest magnitude."""
    if not rewards:
        return True
    low = min(rewards)
    high = max(rewards)
    return high - low <= ROUNDING * max(abs(low), abs(high))


def soft_overlong_penalty(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """Soft penalty in [−1, 0] for responses that end within `buffer` tokens of the limit `longest`.

    lengths [G] → [G]: 0 up to longest − buffer, then falling linearly to −1 at the limit (DAPO, arXiv:2503.14476,
    eq. 13). `buffer` must be above 0.
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)
