"""The bare transfers with which benchmarks/weight_sync.py compares its syncs: only the same bytes are moved.

gloo: a broadcast between processes of their own. file: the bytes are written, and read by as many readers.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.tools.acceptance.broadcast import broadcasting


@contextmanager
def bare_transfer(
    transport: str, sizes: list[int], count: int, folder: Path, timeout_s: float
) -> Iterator[tuple[Callable[[], float], list[int]]]:
    """A function that moves buckets of these sizes to `count` receivers once and returns the seconds, and the process
    ids that take part beside this one. All sides use their memory again."""
    if transport == "file":
        buffer = torch.ones(max(sizes), dtype=torch.uint8)
        readers = [torch.ones(max(sizes), dtype=torch.uint8) for _ in range(count)]
        yield lambda: write_and_read(sizes, buffer, readers, folder), []
        return
    with broadcasting(machine="cpu", sizes=sizes, receivers=count, logs=folder, timeout_s=timeout_s) as broadcast:
        yield broadcast.again, [rank.pid for rank in broadcast.ranks]


def write_and_read(sizes: list[int], buffer: torch.Tensor, readers: list[torch.Tensor], folder: Path) -> float:
    began = time.perf_counter()
    place = folder / "bare"
    place.mkdir()
    for number, size in enumerate(sizes):
        with (place / str(number)).open("wb", buffering=0) as file:
            file.write(memoryview(buffer.numpy())[:size])
    threads = [threading.Thread(target=read, args=(place, sizes, reader)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - began
    shutil.rmtree(place)
    return taken


def read(place: Path, sizes: list[int], buffer: torch.Tensor) -> None:
    for number, size in enumerate(sizes):
        with (place / str(number)).open("rb", buffering=0) as file:
            file.readinto(memoryview(buffer.numpy())[:size])
