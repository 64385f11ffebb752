"""The CPU: gloo between processes, Megatron over the host's view of torch, exact-FLOP attention by segment."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from engine.platform import host_view
from engine.platform.base import Platform

STATUS = Path("/proc/self/status")
RESET_PEAK = "5"
"""Written to /proc/self/clear_refs it makes Linux count the peak again (proc(5))."""


class Cpu(Platform):
    """Any machine; every rank computes on the host."""

    name = "cpu"
    backend = "gloo"
    attention = "cpu"

    def missing(self) -> None:
        """Nothing: torch always has a CPU."""

    def device(self, local_rank: int) -> torch.device:
        """One device for all."""
        return torch.device("cpu")

    def set_device(self, local_rank: int) -> torch.device:
        """There is only the one."""
        return torch.device("cpu")

    def adapt_megatron(self) -> None:
        """See `engine.platform.host_view`."""
        host_view.put_in()

    def synchronize(self) -> None:
        """A CPU returns when it is done."""

    def peak_bytes(self) -> int:
        """Peak resident memory of the process; where there is no /proc, since the process started."""
        if STATUS.exists():
            line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
            return int(line.split()[1]) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def reset_peak(self) -> None:
        """Only Linux can; elsewhere the peak stays that of the process."""
        if STATUS.exists():
            STATUS.with_name("clear_refs").write_text(RESET_PEAK)
