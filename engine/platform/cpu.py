"""The CPU: gloo between processes, Megatron on a view of torch in which CUDA means the host, and attention that
computes almost nothing that is masked."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from engine.platform import host_view
from engine.platform.base import Platform, torch_profiler

STATUS = Path("/proc/self/status")
KEPT = 1 << 30
"""Bytes of freed memory that a process keeps, and size of the smallest tensor that gets memory of its own."""
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Numbers of glibc's options (malloc.h)."""


class Cpu(Platform):
    """Any machine; each rank computes on the host."""

    name = "cpu"
    backend = "gloo"
    attention = "cpu"

    def missing(self) -> None:
        """Return None: torch can always compute on the CPU."""

    def device(self, local_rank: int) -> torch.device:
        """Return the CPU, the only device of all ranks."""
        return torch.device("cpu")

    def set_device(self, local_rank: int) -> torch.device:
        """Return the CPU, and make the process keep freed memory."""
        keep_freed_memory()
        return torch.device("cpu")

    def device_name(self, number: int) -> str:
        """Return "CPU"."""
        return "CPU"

    def adapt_megatron(self) -> None:
        """Give megatron-core the view of torch from `engine.platform.host_view`."""
        host_view.install_host_view()

    def make_deterministic(self) -> None:
        """Do nothing: a CPU sums in the same order each time."""

    def synchronize(self) -> None:
        """Do nothing: an operation on the CPU returns when it is done."""

    def peak_bytes(self) -> int:
        """Return the peak resident memory of the process in bytes. Without /proc it counts from the process's start."""
        if STATUS.exists():
            return _status_bytes("VmHWM")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def held_bytes(self) -> int:
        """Return the resident memory of the process in bytes. Without /proc, return the peak."""
        return _status_bytes("VmRSS") if STATUS.exists() else self.peak_bytes()

    def memory_summary(self) -> str:
        """Return Linux's status of the process; "" on other systems."""
        return STATUS.read_text() if STATUS.exists() else ""

    def profiler(self, folder: Path, name: str) -> profile:
        """Return torch's profiler of the host."""
        return torch_profiler(folder, name, [ProfilerActivity.CPU])


def keep_freed_memory() -> None:
    """Make this process's C library keep freed memory for the next tensors, up to `KEPT` bytes.

    By default glibc returns the memory of each large tensor to the system, and the next tensor gets new pages, which
    the system clears: a tenth of a step of a small model (measured). Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_MMAP_THRESHOLD, KEPT)


def _status_bytes(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
