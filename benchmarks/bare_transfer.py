"""The bare transfers with which benchmarks/weight_sync.py compares its syncs: only the same bytes are moved.

gloo: a broadcast to receivers in processes of their own. file: the bytes are written, and read by as many readers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.wire.weights.groups import Rendezvous, join


@contextmanager
def bare_transfer(
    transport: str, sizes: list[int], count: int, folder: Path, timeout_s: float
) -> Iterator[tuple[Callable[[], None], list[int]]]:
    """A function that moves buckets of these sizes to `count` receivers once, and the receivers' process ids. Both
    sides use their memory again."""
    buffer = torch.ones(max(sizes), dtype=torch.uint8)
    if transport == "file":
        readers = [torch.ones(max(sizes), dtype=torch.uint8) for _ in range(count)]
        yield lambda: write_and_read(sizes, buffer, readers, folder), []
        return
    meeting = Rendezvous("127.0.0.1", transport, timeout_s)
    others = []
    for rank in range(1, count + 1):
        info = {
            "address": meeting.address,
            "rank": rank,
            "world": count + 1,
            "backend": transport,
            "sizes": sizes,
            "timeout_s": timeout_s,
        }
        others.append(subprocess.Popen([sys.executable, __file__, json.dumps(info)], stdin=subprocess.PIPE))
    group = meeting.gather(count + 1)

    def broadcast() -> None:
        for other in others:
            assert other.stdin is not None
            other.stdin.write(b"again\n")
            other.stdin.flush()
        for size in sizes:
            group.broadcast(buffer[:size]).wait()

    try:
        yield broadcast, [other.pid for other in others]
    finally:
        group.close()
        for other in others:
            other.kill()
            other.wait()


def receive(
    address: dict[str, object], rank: int, world: int, backend: str, sizes: list[int], timeout_s: float
) -> None:
    """The other end of a bare broadcast: one pass for each line of standard input."""
    torch.set_num_threads(1)
    group = join(address=address, rank=rank, world=world, backend=backend, timeout_s=timeout_s, off=threading.Event())
    buffer = torch.ones(max(sizes), dtype=torch.uint8)
    for _ in sys.stdin:
        for size in sizes:
            group.broadcast(buffer[:size]).wait()


def write_and_read(sizes: list[int], buffer: torch.Tensor, readers: list[torch.Tensor], folder: Path) -> None:
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
    shutil.rmtree(place)


def read(place: Path, sizes: list[int], buffer: torch.Tensor) -> None:
    for number, size in enumerate(sizes):
        with (place / str(number)).open("rb", buffering=0) as file:
            file.readinto(memoryview(buffer.numpy())[:size])


if __name__ == "__main__":
    receive(**json.loads(sys.argv[1]))
