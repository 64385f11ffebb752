"""What is installed against what Metronome asks for, and what the machine offers."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

SHARED_MEMORY = Path("/dev/shm")


def findings() -> tuple[list[str], bool]:
    """Lines for people, and whether everything that a run needs is there."""
    try:
        required = [Requirement(text) for text in metadata.requires("metronome") or []]
    except metadata.PackageNotFoundError:
        return ["missing   metronome itself: install it with pip install -e ."], False
    packages = [_package(each) for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    python = f"ok        Python {platform.python_version()} on {platform.platform(terse=True)}"
    return [python, _cores(), _shared_memory(), *packages], all(line.startswith("ok") for line in packages)


def _package(required: Requirement) -> str:
    try:
        version = metadata.version(required.name)
    except metadata.PackageNotFoundError:
        return f"missing   {required}"
    if not required.specifier.contains(version, prereleases=True):
        return f"unfit     {required.name} {version}, expected {required.specifier}"
    return f"ok        {required.name} {version}"


def _cores() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        return "slow      1 core: rollouts and training can't overlap; two or more are needed for that"
    return f"ok        {cores} cores"


def _shared_memory() -> str:
    if not SHARED_MEMORY.is_dir():
        return "slow      no shared memory: weights go through files in the run folder"
    return f"ok        {shutil.disk_usage(SHARED_MEMORY).free / 2**30:.1f} GiB of shared memory for weight sync"
