"""Devices by their makers' figures, for a plan of a device that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.model.flops import PEAKS


@dataclass(frozen=True)
class Device:
    """Figures of one device, as published by its maker (dense bf16, no sparsity)."""

    name: str
    platform: Literal["cuda", "npu"]
    """Its value of `platform.device`."""
    flops: float
    """Peak FLOP/s in bf16."""
    bandwidth: float
    """Bytes/s of its memory."""
    memory_gib: float
    link: float
    """Bytes/s to another device of its node, one direction."""
    mesh: bool = False
    """Whether each pair of devices has its own link. Otherwise `link` is the total to all others, through a switch."""

    def to_others(self, ranks: int) -> float:
        """Bytes/s that a rank sends to the others of a group of `ranks` in a node, one direction."""
        return self.link * max(1, ranks - 1) if self.mesh else self.link


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        # HCCS: 392 GB/s over seven links of pairs, both ways
        Device(
            name="910b",
            platform="npu",
            flops=PEAKS["Ascend910B2"],
            bandwidth=1.6e12,
            memory_gib=64,
            link=28e9,
            mesh=True,
        ),
        # one of the two dies of a module: torch_npu shows each as a device
        Device(name="910c", platform="npu", flops=PEAKS["Ascend910_939"], bandwidth=1.6e12, memory_gib=64, link=196e9),
        Device(name="a100", platform="cuda", flops=PEAKS["A100"], bandwidth=2.0e12, memory_gib=80, link=300e9),
        Device(name="h100", platform="cuda", flops=PEAKS["H100"], bandwidth=3.35e12, memory_gib=80, link=450e9),
        Device(name="h20", platform="cuda", flops=PEAKS["H20"], bandwidth=4.0e12, memory_gib=96, link=450e9),
        Device(name="h200", platform="cuda", flops=PEAKS["H200"], bandwidth=4.8e12, memory_gib=141, link=450e9),
    )
}
COPY = 8e9
"""Bytes/s from pageable host memory to a device (train.offload)."""
