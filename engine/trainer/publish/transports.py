"""How buckets get from a pipeline stage's sender to the instances."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.errors import MetronomeError
from engine.wire.weights import bucket_file
from engine.wire.weights.buckets import Bucket
from engine.wire.weights.groups import BroadcastGroup, Rendezvous, Transfer, own_address


class Transport(Protocol):
    """The sender's side of one stage. `meet`, `gather` and `call_off` are for transports that need groups."""

    name: str
    """As in `weights.transport` and update_info."""
    groups: bool
    """Whether the instances must be in a group with the sender."""
    device: torch.device
    """Where buckets must lie."""

    def meet(self, local: bool) -> Mapping[str, str | int]:
        """Open the place where the stage's group will meet; its address. `local`: all instances are on this machine."""

    def gather(self, world: int) -> None:
        """Wait for the group of this many ranks. Raises TransferError, DeadlineError."""

    def call_off(self) -> None:
        """End a `gather` under way, and leave the group."""

    def write(self, bucket: Bucket, info: Mapping[str, Any]) -> Mapping[str, str | int]:
        """Before the instances hear of the bucket: what its update_info needs beside `info`."""

    def send(self, bucket: Bucket) -> Sent:
        """While they hear of it: send the bytes."""


class Sent(Protocol):
    """Bytes under way."""

    def wait(self) -> None:
        """Until they are through. Raises TransferError, DeadlineError."""


class Snapshots:
    """Versions of the weights in a folder that trainer and instances share, one folder of bucket files each.

    The newest complete one stays: a late instance loads it without the ranks. The one before is written over by the
    next: new memory costs four times what writing to it does. Safe for several stages' senders at once.
    """

    def __init__(self, folder: Path, stages: int) -> None:
        """`stages`: how many senders make a version complete."""
        self.folder = folder
        self.stages = stages
        self._written: dict[int, set[str]] = {}
        """Files by version; of this rank's stage."""

    def place(self, version: int) -> Path:
        """Where the version is once it is complete."""
        return self.folder / f"version-{version:08d}"

    def begin(self, version: int) -> None:
        """Take the room of a version that is not needed any more. By one rank, before any writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        patterns = ("version-*.partial", "version-*.old", self.place(version).name)
        unused = [folder for pattern in patterns for folder in self.folder.glob(pattern)]
        for other in unused[1:]:
            shutil.rmtree(other)
        for first in unused[:1]:
            for done in first.glob("*.done"):
                done.unlink()
            first.rename(self._partial(version))
        self._partial(version).mkdir(exist_ok=True)

    def write(self, bucket: Bucket, info: Mapping[str, Any]) -> Path:
        """Write a bucket of the version that was begun; its file."""
        if info["bucket"] == 0:  # of this attempt
            self._written[info["version"]] = set()
        path = self._partial(info["version"]) / f"stage-{info['stage']:03d}-bucket-{info['bucket']:05d}.safetensors"
        try:
            bucket_file.write(path, bucket, {key: info[key] for key in ("names", "dtypes", "shapes", "checksums")})
            self._written[info["version"]].add(path.name)
        except OSError as error:
            raise MetronomeError(f"{path}: weights could not be written: {error.strerror}") from None
        return path

    def stage_done(self, version: int, stage: int) -> None:
        """A stage is written. The last one makes the version visible instead of the one before."""
        partial = self._partial(version)
        place = self.place(version)
        written = self._written.pop(version, set())
        self._written.clear()
        for file in partial.glob(f"stage-{stage:03d}-*"):
            if file.name not in written:
                file.unlink()
        (partial / f"stage-{stage:03d}.done").touch()
        if len(list(partial.glob("*.done"))) < self.stages:
            return
        with contextlib.suppress(FileNotFoundError):  # another stage's sender saw the same and was faster
            for old in self.folder.glob("version-????????"):
                if old != place:
                    old.rename(old.with_suffix(".old"))
            partial.rename(place)

    def _partial(self, version: int) -> Path:
        return self.place(version).with_suffix(".partial")


class _Arrived:
    """Nothing under way."""

    def wait(self) -> None:
        """At once."""


class FileTransport:
    """Each bucket is a file of the version's snapshot, which the instances read."""

    name = "file"
    groups = False
    device = torch.device("cpu")

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def meet(self, local: bool) -> Mapping[str, str | int]:
        """No group."""
        return {}

    def gather(self, world: int) -> None:
        """No group."""

    def call_off(self) -> None:
        """No group."""

    def write(self, bucket: Bucket, info: Mapping[str, Any]) -> Mapping[str, str | int]:
        """The file's path."""
        return {"path": str(self._snapshots.write(bucket, info))}

    def send(self, bucket: Bucket) -> Sent:
        """It lies there already."""
        return _Arrived()


class GroupTransport:
    """Broadcast to all instances: gloo between hosts' memories, nccl between CUDA devices."""

    groups = True

    def __init__(self, backend: str, timeout_s: float, device: torch.device) -> None:
        """`timeout_s`: deadline of the meeting and of each bucket; `device`: of this rank's model."""
        self.name = backend
        self.device = device if backend == "nccl" else torch.device("cpu")
        self._timeout_s = timeout_s
        self._meeting: Rendezvous | None = None
        """Kept when it was called off, until the next one."""
        self._group: BroadcastGroup | None = None

    def meet(self, local: bool) -> Mapping[str, str | int]:
        """A store on this machine."""
        self.call_off()
        self._meeting = Rendezvous(own_address(local), self.name, self._timeout_s)
        return self._meeting.address

    def gather(self, world: int) -> None:
        """Nobody to wait for in a world of one: there is no instance."""
        if self._meeting is None:
            raise MetronomeError("the weight transfer's meeting was not opened")
        self._group = self._meeting.gather(world) if world > 1 else None

    def call_off(self) -> None:
        """Leave the group."""
        if self._meeting is not None:
            self._meeting.call_off()
        if self._group is not None:
            self._group.close()
        self._group = None

    def write(self, bucket: Bucket, info: Mapping[str, Any]) -> Mapping[str, str | int]:
        """Nothing beside the tensors' description."""
        return {}

    def send(self, bucket: Bucket) -> Transfer | _Arrived:
        """Broadcast tensor by tensor, from where they lie."""
        return self._group.broadcast(*bucket.pieces()) if self._group is not None else _Arrived()


def open_transport(name: str, timeout_s: float, device: torch.device, snapshots: Snapshots) -> Transport:
    """The transport of `weights.transport` on a rank whose model is on `device`."""
    if name == "file":
        return FileTransport(snapshots)
    if name == "hccl":
        from engine.trainer.publish.hccl import HcclTransport

        return HcclTransport(timeout_s, device, snapshots.stages)
    return GroupTransport(name, timeout_s, device)
