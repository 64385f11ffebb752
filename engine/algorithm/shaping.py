"""Reward shaping that depends on a response's length."""

from __future__ import annotations

from torch import Tensor


def overlong(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """Soft punishment in [−1, 0] of responses that end within `buffer` tokens of the limit `longest`.

    lengths [G]: 0 up to longest − buffer, then falling linearly to −1 at the limit (DAPO, arXiv:2503.14476, eq. 13).
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)
