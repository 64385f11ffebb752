"""NVIDIA GPUs: NCCL between processes, Megatron almost unchanged, FlashAttention or FlexAttention."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import ClassVar

import torch
from torch.profiler import ProfilerActivity, profile

from engine.platform.base import Accelerator, torch_profiler, without_transformer_engine


class Cuda(Accelerator):
    """One GPU per rank. Does not need Transformer Engine or Apex."""

    name = "cuda"
    backend = "nccl"
    attention = "cuda"
    in_order: ClassVar[dict[str, str]] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    """torch requires the variable of cuBLAS, Megatron's deterministic mode an algorithm of NCCL."""

    def missing(self) -> str | None:
        """Return what is missing, a torch built for CUDA or a GPU that its driver shows; None if nothing is."""
        if not torch.backends.cuda.is_built():
            return f"this torch ({torch.__version__}) is built without CUDA"
        return None if torch.cuda.is_available() else "torch.cuda finds no GPU (driver, CUDA_VISIBLE_DEVICES)"

    def api(self) -> ModuleType:
        """Return `torch.cuda`."""
        return torch.cuda

    def profiler(self, folder: Path, name: str) -> profile:
        """Return torch's profiler of the host and the GPU's kernels."""
        return torch_profiler(folder, name, [ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def adapt_megatron(self) -> None:
        """Define the one name that Megatron lacks without Transformer Engine."""
        without_transformer_engine()
