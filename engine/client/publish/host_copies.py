"""The newest weights in host memory. A snapshot is written from there when a late instance asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from engine.client.publish.transports import Snapshots
from engine.errors import MetronomeError
from engine.run.logs import log_line
from engine.run.threads import in_thread
from engine.wire.sync_messages import BucketInfo
from engine.wire.weights.backends import use_device
from engine.wire.weights.buckets import Bucket, TensorSpec, bucket_cuts, bucket_span, bucket_views

AGAIN_S = 5.0
"""Seconds to wait before retrying to write a snapshot, or to ask an orchestrator that answered with an error."""


class BucketCopy(NamedTuple):
    """A bucket in host memory."""

    info: BucketInfo
    specs: list[TensorSpec]
    memory: Tensor
    """uint8 [span of specs]."""


class HostCopies:
    """Copies of the buckets that this rank sends: of the newest version, and of the one that is being sent.

    There are at most two versions, or three while an outdated snapshot is still being written. Their memory is reused,
    and pinned if the buckets are on a device. A thread writes the newest version as a snapshot once `wanted` returns
    True. Nothing else waits for these files. A newer version ends a snapshot that is being written, which then stays
    incomplete.
    """

    def __init__(self, stage: int, snapshots: Snapshots, wanted: Callable[[int], bool], device: torch.device) -> None:
        """`stage`: the stage that this rank sends. `wanted`: asks whether an instance waits for this version's
        snapshot; it may take a while. `device`: device of the model."""
        self._stage = stage
        self._snapshots = snapshots
        self._wanted = wanted
        self._device = device
        self._stream = None if device.type == "cpu" else torch.get_device_module(device).Stream(device)
        self._free: dict[int, list[Tensor]] = {}
        """Free memory by its size in bytes. A bucket has the same size in every version."""
        self._coming: list[BucketCopy] = []
        self._newest: list[BucketCopy] = []
        self._version: int | None = None
        """Version of `_newest`; None while there is none."""
        self._written: list[BucketCopy] | None = None
        """The copies that are being written. The writer frees their memory if they are outdated by then."""
        self._lock = threading.Lock()
        """Held while the lists are exchanged."""
        self._changed = threading.Event()
        """Set when a version is complete. The writer then asks whether its snapshot is wanted."""
        self._thread = in_thread("snapshots", self._serve)

    @contextmanager
    def beside_training(self) -> Iterator[None]:
        """Run this thread's work on the device on a separate stream, so that neither it nor training waits for the
        other."""
        if self._stream is None:
            yield
            return
        use_device(self._device)
        with torch.get_device_module(self._device).stream(self._stream):
            yield

    def copy(self, bucket: Bucket, info: BucketInfo) -> None:
        """Copy a bucket of the next version. Bucket 0 starts over. The bucket must be complete on its device, and is
        not used after the return. Raises MetronomeError if there is not enough memory."""
        if info.bucket == 0:
            self._release(self._coming)
        memory = self._take(bucket_span(bucket.specs), pinned=bucket.tensors[0].device.type != "cpu")
        with self.beside_training():
            for piece, cut in zip(bucket.pieces(), bucket_cuts(memory, bucket.specs), strict=True):
                cut.copy_(piece, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()
        self._coming.append(BucketCopy(info, bucket.specs, memory))

    def complete_version(self, version: int) -> None:
        """Make the copied buckets the newest version, replacing the previous one."""
        self._replace(version, self._coming)
        self._coming = []
        self._changed.set()

    def free_version(self) -> None:
        """Free the newest version's memory, before the next version is copied."""
        self._replace(None, [])

    def _replace(self, version: int | None, copies: list[BucketCopy]) -> None:
        with self._lock:
            old = self._newest
            self._newest = copies
            self._version = version
            if old is not self._written:
                self._release(old)

    def _take(self, nbytes: int, pinned: bool) -> Tensor:
        if free := self._free.get(nbytes):
            return free.pop()
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        except (RuntimeError, MemoryError) as error:
            raise MetronomeError(
                f"the copy of the weights that late instances load needs {nbytes} more bytes of host memory: {error}"
            ) from None

    def _release(self, copies: list[BucketCopy]) -> None:
        for one in copies:
            self._free.setdefault(len(one.memory), []).append(one.memory)
        copies.clear()

    # the snapshot ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            self._changed.wait()  # no deadline: without a version there is nothing to write
            self._changed.clear()
            version = self._version
            while version is not None and version == self._version and not self._changed.is_set():
                if self._is_wanted(version) and self._is_written(version):
                    break

    def _is_wanted(self, version: int) -> bool:
        try:
            return self._wanted(version)
        except MetronomeError:  # the trainer's own requests end with the same error
            self._changed.wait(AGAIN_S)
            return False

    def _is_written(self, version: int) -> bool:
        """Write the snapshot. Return whether no other attempt is needed."""
        try:
            self._write(version)
        except MetronomeError as error:
            if self._version == version:  # otherwise the orchestrator has cleared the folder
                log_line(f"late instances wait for the snapshot of weight version {version}: {error}")
                self._changed.wait(AGAIN_S)
            return False
        return True

    def _write(self, version: int) -> None:
        """Write the version's files, unless a newer version arrives."""
        with self._lock:
            if self._version != version:
                return
            copies = self._written = self._newest
        try:
            for number, (info, specs, memory) in enumerate(copies):
                if self._version != version:
                    return
                self._snapshots.write_bucket(Bucket(number, specs, bucket_views(memory, specs), memory), info)
            self._snapshots.stage_done(version, self._stage)
        finally:
            with self._lock:
                self._written = None
                if copies is not self._newest:
                    self._release(copies)
