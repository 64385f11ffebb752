"""Bare broadcasts between ranks in separate processes: only bytes are moved, over a platform's backend.

`python -m engine.tools.acceptance.broadcast` is one rank. The ranks find each other, and receive their commands, in a
store of the process that started them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from engine import platform
from engine.errors import DeadlineError
from engine.run.process import Child, python_command, stop_all, watch_lifeline
from engine.wire.weights.groups import serve_store

HOST = "127.0.0.1"
POLL_S = 0.002
"""Seconds between two checks whether a broadcast is complete. The sender measures the time, independent of this."""
FOREVER = timedelta(days=1)
"""A rank waits until it is ended. It waits in the store, because a loop would take time from what is being measured."""
MARK = 7
"""Value of the bytes that the first broadcast sends."""


class Broadcast:
    """A sender (rank 0) and receivers. Each call of `again` moves the same buckets once."""

    def __init__(self, ranks: Sequence[Child], store: dist.TCPStore, timeout_s: float) -> None:
        self.ranks = ranks
        self._store = store
        self._timeout_s = timeout_s
        self._round = 0

    def again(self) -> float:
        """Move the buckets once. Return the seconds until all ranks had them.

        Raises ProcessDied if a rank dies, and DeadlineError.
        """
        self._round += 1
        self._store.set(f"go/{self._round}", "1")
        self._await(f"done/{self._round}", f"broadcast {self._round}")
        return float(self._store.get(f"done/{self._round}"))

    def ready(self) -> None:
        """Wait until the ranks have connected and compared the bytes of a first broadcast."""
        self._await("ready", "the ranks' first broadcast")

    def _await(self, key: str, what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            for rank in self.ranks:
                rank.check_alive()
            if time.monotonic() > deadline:
                how = "; ".join(f"{rank.name} {rank.how_it_ended()}" for rank in self.ranks)
                raise DeadlineError(f"{what} did not finish within {self._timeout_s:g} s: {how}")
            time.sleep(POLL_S)


@contextmanager
def broadcasting(
    machine: str, sizes: Sequence[int], receivers: int, logs: Path, timeout_s: float
) -> Iterator[Broadcast]:
    """A sender and `receivers`, each on its own device of the platform `machine` (on a CPU all on the host), with
    buckets of these sizes in bytes. All ranks reuse their memory."""
    store = serve_store(HOST, timeout_s)
    ranks: list[Child] = []
    try:
        for rank in range(receivers + 1):
            place = {"port": store.port, "rank": rank, "world": receivers + 1, "timeout_s": timeout_s}
            what = json.dumps({"machine": machine, "sizes": list(sizes), **place})
            command = python_command("engine.tools.acceptance.broadcast", what)
            ranks.append(Child(f"broadcast rank {rank}", command, logs / f"broadcast-{rank}.log"))
        running = Broadcast(ranks, store, timeout_s)
        running.ready()
        yield running
    finally:
        stop_all(ranks, 1.0)


def _rank(machine: str, port: int, rank: int, world: int, sizes: list[int], timeout_s: float) -> None:
    """Take part in broadcasts until the process is ended."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=timeout_s)
    used = platform.PLATFORMS[machine]
    device = used.set_device(rank)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=wait)
    dist.init_process_group(
        used.backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world, timeout=wait
    )
    value = MARK if rank == 0 else 0
    buffer = torch.full((max(sizes),), value, dtype=torch.uint8, device=device)
    together = torch.zeros(1, device=device)

    def once() -> None:
        for size in sizes:
            dist.broadcast(buffer[:size], 0)
        dist.all_reduce(together)  # completes on every rank only when all have received
        used.synchronize()

    once()
    if not bool((buffer[: max(sizes)] == MARK).all()):
        raise SystemExit(f"rank {rank} received bytes that differ from what rank 0 sent")
    dist.all_reduce(together)  # all ranks have finished the comparison
    used.synchronize()
    if rank == 0:
        store.set("ready", "1")
    number = 0
    while True:
        number += 1
        store.wait([f"go/{number}"], FOREVER)
        began = time.perf_counter()
        once()
        if rank == 0:
            store.set(f"done/{number}", str(time.perf_counter() - began))


if __name__ == "__main__":
    watch_lifeline()
    with contextlib.suppress(KeyboardInterrupt):
        _rank(**json.loads(sys.argv[1]))
