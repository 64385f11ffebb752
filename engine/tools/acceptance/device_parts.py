"""The parts that need only torch and devices: an inventory, a first computation, the kernels, a broadcast."""

from __future__ import annotations

import platform as system
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from engine import platform
from engine.errors import BadInput, MetronomeError
from engine.platform import PLATFORMS, Platform
from engine.platform.base import Accelerator
from engine.run.logs import log_traceback
from engine.tools.acceptance.broadcast import broadcasting
from engine.tools.acceptance.comparisons import comparisons
from engine.tools.acceptance.notes import PartFailed, PartSkipped, PartTask

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


BROADCAST_BYTES = {"cpu": 64 * 2**20}
BROADCAST_BYTES_ELSEWHERE = 512 * 2**20
BROADCASTS = 5
"""Number of broadcasts that are timed after a first one."""
MEETING_S = 60.0
"""Time limit in seconds for connecting the ranks, and for each broadcast."""

FP32_ONLY = (
    'all comparisons in bf16 are right, so train with train.dtype = "bfloat16", and not in float32 (the default): its '
    "results on this device are less exact than fp32; report it with this page"
)


def versions(task: PartTask) -> None:
    """List torch, driver and devices. Raises PartFailed if the platform lacks something."""
    task.notes.doing("list of the devices")
    machine = chosen_platform(task.platform)
    missing = machine.missing()
    if missing:
        raise PartFailed(f"platform {machine.name}: {missing}")
    for line in inventory(machine):
        task.notes.say(line)
    names = [machine.device_name(number) for number in range(device_count(machine))]
    task.notes.figures(platform=machine.name, torch=torch.__version__, devices=names)


def devices(task: PartTask) -> None:
    """Allocate and compute on each device. Raises PartFailed after all devices were tried."""
    machine = chosen_platform(task.platform)
    wrong = []
    for number in range(device_count(machine)):
        task.notes.doing(f"first computation on {machine.name} device {number}")
        try:
            task.notes.say(try_device(machine, number))
        except Exception as error:  # noqa: BLE001 - the other devices are tried as well
            log_traceback(error)
            wrong.append(f"device {number}: {type(error).__name__}: {str(error).splitlines()[0]}")
    if wrong:
        raise PartFailed("; ".join(wrong))


def kernels(task: PartTask) -> None:
    """Compare the platform's kernels and the model with references. Raises PartFailed after all comparisons."""
    machine = complete_platform(task.platform)
    exact_matmuls(machine)
    wrong = []
    found = []
    only_fp32 = machine.name != "cpu"
    with platform.single_session(machine) as device:
        for what, compare in comparisons(machine.attention, device):
            task.notes.doing(f"{what} (a compilation on the first call)")
            try:
                for comparison in compare():
                    task.notes.say(str(comparison))
                    found.append(comparison.figures())
                    right = comparison.right
                    wrong += [] if right else [f"{comparison.what}, {comparison.dtype}"]
                    only_fp32 &= right or comparison.dtype == "float32"
            except Exception as error:  # noqa: BLE001 - the others are compared as well
                log_traceback(error)
                only_fp32 = False
                wrong.append(f"{what} raised {type(error).__name__}: {str(error).splitlines()[0]}")
    task.notes.figures(comparisons=found)
    if wrong:
        raise PartFailed(
            f"{'; '.join(wrong)}: differs from the reference by more than its limit, or did not run",
            FP32_ONLY if only_fp32 else "",
        )


def broadcast(task: PartTask) -> None:
    """Time a broadcast between two devices, or two processes on a CPU. Raises PartSkipped if there is only one
    device.
    """
    machine = chosen_platform(task.platform)
    if machine.name != "cpu" and device_count(machine) < 2:
        raise PartSkipped(f"{machine.backend} needs two devices, but this process sees one")
    size = BROADCAST_BYTES.get(machine.name, BROADCAST_BYTES_ELSEWHERE)
    task.notes.doing(f"two ranks meet over {machine.backend} and broadcast")
    with broadcasting(
        machine=machine.name, sizes=[size], receivers=1, logs=task.folder / "broadcast", timeout_s=MEETING_S
    ) as pair:
        seconds = statistics.median(pair.again() for _ in range(BROADCASTS))
    rate = size / seconds / 1e9
    task.notes.say(f"{machine.backend}, 2 ranks: {size / 1e6:.0f} MB in {seconds * 1e3:.1f} ms, {rate:.2f} GB/s")
    task.notes.figures(backend=machine.backend, bytes=size, seconds=seconds, gb_per_s=rate)
