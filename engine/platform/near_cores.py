"""The CPU cores near an accelerator (those of its NUMA node, as reported by the system) and a device's share of them.

None of this has run on a machine with accelerators.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path

SYSFS = Path("/sys")
CORE_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
"""A list of cores as Linux writes it: 0-3,8,10-11."""
NPU_ROW = re.compile(r"NPU(\d+)\s.*\s(?!Affinity)(\S+)")
"""A device's row of `npu-smi info -t topo`: its number, and a list of cores in the last column, "CPU Affinity"."""


def cores_of(text: str) -> list[int]:
    """Return the cores in a list as Linux writes it, ascending; [] if the text is not such a list."""
    if not CORE_LIST.fullmatch(text.strip()):
        return []
    ranges = [list(map(int, part.split("-"))) for part in text.strip().split(",")]
    return sorted({core for ends in ranges for core in range(ends[0], ends[-1] + 1)})


def cores_near_pci(address: str, sysfs: Path = SYSFS) -> list[int]:
    """Return the cores near the PCI device with this address (0000:3b:00.0); [] if the system does not report them."""
    try:
        return cores_of((sysfs / "bus/pci/devices" / address / "local_cpulist").read_text())
    except OSError:
        return []


def cores_near_npus(table: str) -> list[list[int]]:
    """Return the cores near each NPU by its number, from the output of `npu-smi info -t topo`; [] unless the table has
    a row with cores for every number from 0 on."""
    rows = [match for line in table.splitlines() if (match := NPU_ROW.fullmatch(line.strip()))]
    found = [(int(row[1]), cores_of(row[2])) for row in rows]
    complete = all(number == place and cores for place, (number, cores) in enumerate(found))
    return [cores for _, cores in found] if complete else []


def choose_cores(device: int, near: Sequence[Collection[int]], allowed: Collection[int], least: int) -> list[int]:
    """Return the cores to bind the process that uses the device to; [] for no binding.

    `near`: the cores near each device of this machine; `allowed`: cores that the process may use; `least`: fewest cores
    to bind a process to. Devices with the same cores share them: each gets its part of every range of consecutive core
    numbers, because the second hardware threads of all cores often form a separate range. If that part is too small,
    all cores near the device are used. If these are all that the process may use, there is nothing to bind.
    """
    mine = sorted(set(near[device]) & set(allowed)) if device < len(near) else []
    if len(mine) == len(set(allowed)):
        return []
    sharing = [other for other, cores in enumerate(near) if set(cores) == set(near[device])] if mine else [device]
    first = sharing.index(device)
    count = len(sharing)
    part = [core for run in _runs(mine) for core in run[len(run) * first // count : len(run) * (first + 1) // count]]
    return next((cores for cores in (part, mine) if len(cores) >= max(1, least)), [])


def _runs(cores: Sequence[int]) -> list[Sequence[int]]:
    """Return the ranges of consecutive numbers in a sorted list."""
    cuts = [0, *(place for place, (a, b) in enumerate(pairwise(cores), 1) if b != a + 1), len(cores)]
    return [cores[a:b] for a, b in pairwise(cuts)]
