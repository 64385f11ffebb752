"""The linear maps of the embedded engine. They use oneDNN where it is faster than MKL, which `F.linear` calls on a CPU.

MKL uses AVX-512 on Intel's CPUs only: on one core of an AMD EPYC of 2024 it does 90 GFLOP/s and oneDNN 210, with the
same fp32 arithmetic. torch ships both. In fp32 it gives access to oneDNN by an operator that its compiler uses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 32
"""Fewest rows for oneDNN. With fewer, its overhead of about 10 µs exceeds what it saves (measured, hidden 128)."""


def available() -> bool:
    """Whether this torch has oneDNN's operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


ONEDNN = available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [n, in] · weight [out, in]ᵀ + bias [out] in fp32, without gradients.

    A row of the result depends on n and the same row of x only.
    """
    if ONEDNN and len(x) >= ROWS:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
