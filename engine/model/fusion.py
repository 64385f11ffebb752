"""Operations that torch compiles into one kernel on CUDA, where there is no ready one."""

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
    """Whether functions are compiled for the tensor's device: CUDA with triton. Without triton a warning says so."""
    return x.is_cuda and _has_compiler()


@cache
def _has_compiler() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        warnings.warn(
            "the package triton is not installed: SwiGLU, the rotation, the merge of attention's parts, and norms "
            "with their sums are not fused on CUDA, but computed in single operations",
            stacklevel=2,
        )
    return found


@cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled once for any length. `fullgraph` makes torch raise rather than go on uncompiled.

    torch still compiles a few variants (sizes of one, with and without gradient), and gives up after 8 by default.
    """
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=True, fullgraph=True)
