"""Measures what the snapshot for late instances costs a weight sync of tensor-parallel trainers.

`python benchmarks/snapshots.py [--bucket-mb 16]` publishes two versions of a model of 64 buckets with the trainer's own
publisher, as a rank that gathers its tensors together with others; the first version warms up. Nothing is on the other
end: sending a bucket takes `--send-ms`. Writing a bucket's file takes `--write-ms` (the defaults are those of 256 MiB
at 25 GB/s and at 2 GB/s), and is a real write, to shared memory, which is then waited for.

`with_files_s` is the same sync where a bucket's buffer is free only once its file is written, as it was before: the
publisher's own pipeline with that step. `sync_s` is the publisher's sync, and `late_s` the time from a late instance's
request to the whole snapshot, while the next version is published after a second (`sync_beside_s`) and so ends the
first attempt. `copies_mb` is the host memory that the copies take. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from common import result

from engine.client.publish.publisher import UNDER_WAY, Publisher, SendPipeline
from engine.client.publish.transports import Snapshots, open_transport
from engine.run.process import SHARED_MEMORY
from engine.wire.message import Done
from engine.wire.sync_messages import (
    BucketInfo,
    IsSnapshotWanted,
    OpenSync,
    Proceed,
    SendBucket,
    SnapshotWanted,
    SyncOpened,
)
from engine.wire.weights import bucket_file
from engine.wire.weights.buckets import Buffers, pack_buckets

BUCKETS = 64
TIMEOUT_S = 120.0


class Model:
    """Its tensors lie in the same memory: their values are no matter here."""

    def __init__(self, bucket_bytes: int) -> None:
        self._tensor = torch.ones(bucket_bytes, dtype=torch.uint8).view(torch.float32)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a tensor for each bucket."""
        for number in range(BUCKETS):
            yield f"layer{number}", self._tensor

    def probe(self, token_ids: list[int]) -> list[float]:
        """Return nothing: nothing is compared."""
        return []


class Orchestrator:
    """Answers the publisher; sending a bucket takes `send_s`."""

    def __init__(self, send_s: float) -> None:
        self._send_s = send_s
        self.late = threading.Event()
        """A late instance waits for the snapshot."""

    def ask(self, request: Any) -> Any:  # noqa: ANN401
        """Return the reply to a request."""
        if isinstance(request, OpenSync):
            return SyncOpened(generation=1, members=("a",), world_size=1, connect=False, local=True, probe=())
        if isinstance(request, SendBucket):
            time.sleep(self._send_s)
            return Proceed()
        if isinstance(request, IsSnapshotWanted):
            return SnapshotWanted(self.late.wait(1.0))
        return Done()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket-mb", type=int, default=16, help="of memory; five versions of 64 such must fit")
    parser.add_argument("--send-ms", type=float, default=10.0)
    parser.add_argument("--write-ms", type=float, default=130.0)
    arguments = parser.parse_args()
    bucket_bytes = arguments.bucket_mb * 2**20
    write_slowly(arguments.write_ms / 1000)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        before = sync_with_files(Path(folder) / "files", bucket_bytes, arguments.send_ms / 1000)
        print(f"with a file written before each bucket is sent: {before:.2f} s", flush=True)
        orchestrator = Orchestrator(arguments.send_ms / 1000)
        figures = sync(orchestrator, Path(folder) / "copies", bucket_bytes)
        print(f"as it is: {figures['sync_s']:.2f} s", flush=True)
        print(
            f"while a late instance loads: {figures['sync_beside_s']:.2f} s; the late instance waits "
            f"{figures['late_s']:.1f} s",
            flush=True,
        )
    print(f"ratio: {before / figures['sync_s']:.1f}")
    result({"bucket_mb": arguments.bucket_mb, "with_files_s": before, **figures, "ratio": before / figures["sync_s"]})


def write_slowly(least_s: float) -> None:
    """Have every write of a bucket take at least so long."""
    write = bucket_file.write_bucket

    def slow(*arguments: Any) -> None:  # noqa: ANN401
        began = time.perf_counter()
        write(*arguments)
        time.sleep(max(0.0, began + least_s - time.perf_counter()))

    bucket_file.write_bucket = slow


def sync_with_files(folder: Path, bucket_bytes: int, send_s: float) -> float:
    """Seconds until all buckets are sent, where each one's buffer is free only once its file is written."""
    snapshots = Snapshots(folder, 1)
    snapshots.begin(0)
    buffers = Buffers(UNDER_WAY, TIMEOUT_S)
    steps = [lambda bucket, info: time.sleep(send_s), snapshots.write]
    pipeline = SendPipeline(steps, lambda bucket: buffers.give(bucket.buffer), 1, TIMEOUT_S)
    began = time.perf_counter()
    for bucket in pack_buckets(Model(bucket_bytes).tensors(), torch.float32, bucket_bytes, buffers):
        info = BucketInfo(transport="gloo", version=0, stage=0, bucket=bucket.number, **bucket.wire())
        pipeline.put(bucket, info)
    pipeline.wait()
    taken = time.perf_counter() - began
    pipeline.drain()
    return taken


def sync(orchestrator: Orchestrator, folder: Path, bucket_bytes: int) -> dict[str, float]:
    """Seconds of a sync, of a late instance, and of the sync beside it."""
    publisher = Publisher(
        connection=orchestrator,  # type: ignore[arg-type]
        ranks=one_of_two(),
        transport=partial(open_transport, "gloo", TIMEOUT_S, torch.device("cpu")),
        folder=folder,
        dtype=torch.float32,
        bucket_bytes=bucket_bytes,
        timeout_s=TIMEOUT_S,
    )
    model = Model(bucket_bytes)
    resident = psutil.Process().memory_info().rss
    seconds = []
    began = 0.0
    for version in (0, 1, 2, 3):
        if version == 3:
            began = time.perf_counter()
            orchestrator.late.set()
            time.sleep(1.0)
        seconds.append(publisher.publish(model, version))
        publisher.verify(model, version)
        publisher.settle()
    while not (folder / "version-00000003").is_dir():
        time.sleep(0.01)
    late = time.perf_counter() - began
    copies = (psutil.Process().memory_info().rss - resident) / 2**20
    return {"sync_s": seconds[2], "sync_beside_s": seconds[3], "late_s": late, "copies_mb": copies}


def one_of_two() -> Any:  # noqa: ANN401
    """A rank that sends the stage which it shares with another, of which nothing is needed here."""
    return SimpleNamespace(
        exports=True, writes=True, stage=0, from_first=lambda act: act(), gather=lambda message: [message, message]
    )


if __name__ == "__main__":
    main()
