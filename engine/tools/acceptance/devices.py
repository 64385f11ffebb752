"""The devices that this process sees: their names, memory and software, and a first computation on each.

Needs only torch. Every function may hang or crash if a driver or device is broken, so call it in a separate process.
"""

from __future__ import annotations

import platform as system
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.errors import BadInput, MetronomeError
from engine.platform import PLATFORMS, Platform
from engine.platform.base import Accelerator

ASCEND_DRIVER = Path("/usr/local/Ascend/driver/version.info")
"""File with the driver's version (a line Version=25.2.0), from Ascend's installation guide."""
DRIVER_S = 20.0
"""Time limit in seconds of nvidia-smi."""
SIDE = 1024
"""Side of the matrices of the first computation."""
TRIED_BYTES = 256 * 2**20
"""Bytes of the first allocation."""


def chosen_platform(name: str) -> Platform:
    """The platform of this name, or for "auto" the first that is present. It may lack something
    (`Platform.missing`).
    """
    if name == "auto":
        return next(platform for platform in PLATFORMS.values() if platform.present())
    return PLATFORMS[name]


def device_count(machine: Platform) -> int:
    """Number of devices of this machine that the process sees; 1 for the CPU."""
    return int(machine.api().device_count()) if isinstance(machine, Accelerator) else 1


def exact_matmuls(machine: Platform) -> None:
    """Make matrix products of fp32 run in fp32: without TF32 on CUDA and HF32 on NPU."""
    if machine.name == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    elif isinstance(machine, Accelerator):
        machine.api().matmul.allow_hf32 = False


def inventory(machine: Platform) -> Iterator[str]:
    """Lines on torch, the driver, the communication library and each device with its memory."""
    yield f"torch {torch.__version__}, platform {machine.name}"
    if not isinstance(machine, Accelerator):
        missing = "; ".join(f"{other.name}: {other.missing()}" for other in PLATFORMS.values() if other.missing())
        yield f"no accelerator is used: all parts test the CPU{f' ({missing})' if missing else ''}"
        yield f"CPU: {system.machine()}, {torch.get_num_threads()} computing threads"
        return
    yield from _software(machine)
    for number in range(device_count(machine)):
        memory = machine.api().get_device_properties(number).total_memory / 2**30
        yield f"device {number}: {machine.device_name(number)}, {memory:.1f} GiB"


def _software(machine: Accelerator) -> Iterator[str]:
    if machine.name == "npu":
        lines = ASCEND_DRIVER.read_text(errors="replace").splitlines() if ASCEND_DRIVER.is_file() else []
        versions = [line.partition("=")[2] for line in lines if line.startswith("Version=")]
        yield f"driver {versions[0]}" if versions else f"driver: unknown, no version found in {ASCEND_DRIVER}"
        yield "HCCL: the one in CANN"
        return
    yield f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield f"driver: unknown, nvidia-smi does not answer ({error})"
        return
    yield f"driver {', '.join(sorted(set(done.stdout.split())))}"


def try_device(machine: Platform, number: int) -> str:
    """Allocate memory on a device and multiply two matrices of small integers, whose product is exact. Return a line.

    Raises MetronomeError if the product is wrong, and torch's errors.
    """
    device = machine.set_device(number)
    exact_matmuls(machine)
    held = torch.zeros(TRIED_BYTES, dtype=torch.uint8, device=device)
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, (SIDE, SIDE), generator=draw).float() for _ in range(2))
    product = (a.to(device) @ b.to(device)).cpu()
    if int(held.sum()) or not torch.equal(product, a @ b):
        wrong = int((product != a @ b).sum())
        raise MetronomeError(
            f"{device}: {wrong} of {SIDE**2} entries of a product of small integers are wrong, or memory is not zero "
            "after it was set to zero"
        )
    return f"{device}: {TRIED_BYTES // 2**20} MiB allocated, a {SIDE}×{SIDE} matrix product is exact"


def complete_platform(name: str) -> Platform:
    """`chosen_platform`, which must lack nothing. Raises BadInput otherwise."""
    machine = chosen_platform(name)
    if missing := machine.missing():
        raise BadInput(f"{machine.name}: {missing}")
    return machine
