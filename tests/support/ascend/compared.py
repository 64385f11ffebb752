"""Ranks of two adaptors on the same cases, compared with each other and with nobody else."""

import torch

from support.parallel.harness import Worlds

MEASURED = ("train_s", "score_s", "memory_peak_gib")
"""Figures that no two runs agree in."""


class Compared(Worlds):
    """Worlds that are not compared with transformers."""

    def _expected(self, model, groups, temperature, loss):
        return None


def different(one, other, place=""):
    """The places in which two trees of numbers and tensors are not the same bit for bit."""
    if torch.is_tensor(one):
        return [] if one.dtype is other.dtype and torch.equal(one, other) else [place]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{place}: keys"]
        return [
            found for key in one if key not in MEASURED for found in different(one[key], other[key], f"{place}/{key}")
        ]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{place}: lengths"]
        return [
            found for at, pair in enumerate(zip(one, other, strict=True)) for found in different(*pair, f"{place}/{at}")
        ]
    return [] if one == other else [place]
