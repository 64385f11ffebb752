"""NVIDIA GPUs: NCCL between processes, Megatron almost unchanged, FlashAttention or FlexAttention."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerActivity, profile

from engine.platform.base import Accelerator, torch_profiler, without_transformer_engine
from engine.platform.near_cores import SYSFS, cores_near_pci


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

    def near_cores(self, sysfs: Path = SYSFS) -> list[list[int]]:
        """Return the cores of each GPU's NUMA node, by its PCI address. `sysfs`: where the system describes its
        devices."""
        found = map(self.api().get_device_properties, range(self.api().device_count()))
        return [cores_near_pci(address, sysfs) if (address := _pci_address(one)) else [] for one in found]

    def profiler(self, folder: Path, name: str) -> profile:
        """Return torch's profiler of the host and the GPU's kernels."""
        return torch_profiler(folder, name, [ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def adapt_megatron(self) -> None:
        """Define the one name that Megatron lacks without Transformer Engine."""
        without_transformer_engine()


def _pci_address(properties: Any) -> str | None:  # noqa: ANN401
    """Return a GPU's PCI address from torch's description; None if this torch does not report it."""
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, device = ("" if number is None else f"{number:02x}" for number in numbers)
    return f"{domain:0>4}:{bus}:{device}.0" if domain and bus and device else None
