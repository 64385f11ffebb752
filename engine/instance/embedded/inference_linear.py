"""The linear maps of the embedded engine, by oneDNN where that is faster than what `F.linear` calls on a CPU (MKL).

MKL does not use AVX-512 on CPUs that are not Intel's: on one core of an AMD EPYC of 2024 it does 90 GFLOP/s, oneDNN
210, with the same fp32 arithmetic. torch ships both; in fp32 it reaches oneDNN by this operator, which its compiler
uses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 32
"""Below, oneDNN's dearer call (about 10 µs) costs more than it saves (measured, hidden 128)."""


def available() -> bool:
    """Whether this torch has the operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


ONEDNN = available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, in] · weight [out, in]ᵀ + bias [out], fp32, no gradients;
    a row of the result depends on n and its own row only."""
    if ONEDNN and len(x) >= ROWS:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
