"""Operations that torch compiles into one kernel on CUDA, where no ready-made kernel exists."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor

VARIANTS = 32
"""Largest number of compiled variants of a function."""


def can_fuse(x: Tensor) -> bool:
    """Whether functions are compiled for the tensor's device, which must be CUDA with triton. Warns if triton is
    missing."""
    return x.is_cuda and _has_compiler()


@cache
def _has_compiler() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        warnings.warn(
            "the package triton is not installed: SwiGLU, the rotation, the merge of attention's parts, norms "
            "with their sums, and log-probabilities run as separate operations on CUDA instead of fused ones",
            stacklevel=2,
        )
    return found


@cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled once for all lengths. `fullgraph` makes torch raise an error instead of continuing
    uncompiled.

    torch still compiles a few variants (sizes of one, with and without gradient); by default it gives up after 8.
    """
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=True, fullgraph=True)
