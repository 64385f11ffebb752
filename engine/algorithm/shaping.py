"""Reward shaping that depends on a response's length."""

from __future__ import annotations

from torch import Tensor


def overlong(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """Soft penalty in [−1, 0] for responses that end within `buffer` tokens of the limit `longest`.

    lengths [G] → [G]: 0 up to longest − buffer, then falling linearly to −1 at the limit (DAPO, arXiv:2503.14476,
    eq. 13). `buffer` must be above 0.
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)
