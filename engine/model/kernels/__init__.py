"""Attention kernels over a `Layout`: one per platform and the reference, with the signature of
`reference.masked_attention`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.model.kernels import cpu, cuda, npu, reference
from engine.model.layout import Layout

Kernel = Callable[[Tensor, Tensor, Tensor, Layout, float | None], Tensor]

KERNELS: dict[str, Kernel] = {
    "reference": reference.masked_attention,
    "cpu": cpu.attend,
    "cuda": cuda.attend,
    "npu": npu.attend,
}
"""The kernels, by their names in `Platform.attention`, and the reference."""
