"""The parts that need only torch and devices: an inventory, a first computation, the kernels, a broadcast."""

from __future__ import annotations

import statistics

import torch

from engine import platform
from engine.run.logs import log_traceback
from engine.tools.acceptance.broadcast import broadcasting
from engine.tools.acceptance.comparisons import comparisons
from engine.tools.acceptance.devices import (
    chosen_platform,
    complete_platform,
    device_count,
    exact_matmuls,
    inventory,
    try_device,
)
from engine.tools.acceptance.notes import PartFailed, PartSkipped, PartTask

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
