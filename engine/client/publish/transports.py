"""The transports with which the sender of a pipeline stage gets buckets to the instances."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from engine.config import Config
from engine.errors import MetronomeError
from engine.wire.address import split_address
from engine.wire.messages import BucketInfo, MeetingPlace
from engine.wire.weights import bucket_file
from engine.wire.weights.backends import group_device, use_device
from engine.wire.weights.buckets import Bucket
from engine.wire.weights.groups import BroadcastGroup, Rendezvous, Transfer, own_address

Address = Callable[[bool], str]
"""Returns this machine's address for the members of a group. Its argument: whether all of them are on this machine."""


def address_of(config: Config) -> Address:
    """Return this machine's address on the run's network: towards the rendezvous, or, with one node, where it
    listens."""
    several = config.parallel.nodes > 1
    address, key = (
        (config.parallel.rendezvous, "parallel.rendezvous") if several else (config.rollout.listen, "rollout.listen")
    )
    return partial(own_address, interface=config.weights.interface, towards=split_address(address, key)[0])


class Transport:
    """The sender's side of one pipeline stage. `meet`, `gather` and `call_off` are for transports with groups; others
    need none, and do nothing."""

    name: str
    """The name in `weights.transport` and update_info."""
    groups: bool
    """Whether the instances must be in a communication group with the sender."""
    device: torch.device
    """Device on which buckets must be."""

    def meet(self, local: bool) -> MeetingPlace | None:
        """Open the place where the stage's group meets. `local`: whether all instances are on this machine."""
        return None

    def gather(self, world: int) -> None:
        """Wait until all `world` ranks of the group have joined. Raises TransferError, DeadlineError."""

    def call_off(self) -> None:
        """End a `gather` that is in progress, and leave the group."""

    def write(self, bucket: Bucket, info: BucketInfo) -> None:
        """Prepare the bucket and complete `info`, before the instances are told about the bucket."""

    def send(self, bucket: Bucket) -> Transfer | None:
        """Begin to send the bytes, while the instances are told about the bucket; None if there are none to send."""
        return None


class FileTransport(Transport):
    """Each bucket is a file in a folder that trainer and instances share. The next version overwrites it in place:
    new memory costs four times as much as writing to old memory."""

    name = "file"
    groups = False
    device = torch.device("cpu")

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, bucket: Bucket, info: BucketInfo) -> None:
        """Write the file, and store its path in `info`. Raises MetronomeError."""
        path = self._folder / f"stage-{info.stage:03d}-bucket-{info.bucket:05d}.safetensors"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            bucket_file.write_bucket(path, bucket)
        except OSError as error:
            raise MetronomeError(f"{path}: weights could not be written: {error.strerror}") from None
        info.path = str(path)


class GroupTransport(Transport):
    """Broadcasts to all instances: gloo between host memories, nccl and hccl between devices."""

    groups = True

    def __init__(self, backend: str, timeout_s: float, device: torch.device, address: Address = own_address) -> None:
        """`timeout_s`: deadline of the meeting and of each bucket. `device`: device of this rank's model. `address`:
        returns this machine's address, where instances meet it. Raises BadInput if the backend can't send from the
        device."""
        self.name = backend
        self._address = address
        self.device = group_device(backend, device)
        self._timeout_s = timeout_s
        self._meeting: Rendezvous | None = None
        """Kept after it was called off, until the next one. A late instance learns there that it was called off."""
        self._group: BroadcastGroup | None = None

    def meet(self, local: bool) -> MeetingPlace:
        """Leave the last group, and open a store on this machine."""
        self.call_off()
        self._meeting = Rendezvous(self._address(local), self.name, self._timeout_s, self.device)
        return MeetingPlace(self._meeting.host, self._meeting.port)

    def gather(self, world: int) -> None:
        """Wait for the instances. A world of one has none, and so no group."""
        if self._meeting is None:
            raise MetronomeError("the weight transfer is not connected: `meet` must be called before `gather`")
        self._group = self._meeting.gather(world) if world > 1 else None

    def call_off(self) -> None:
        """Call off the meeting, and leave the group."""
        if self._meeting is not None:
            self._meeting.call_off()
        if self._group is not None:
            self._group.close()
        self._group = None

    def send(self, bucket: Bucket) -> Transfer | None:
        """Broadcast the tensors one by one, from where they are."""
        use_device(self.device)
        return self._group.broadcast(*bucket.pieces()) if self._group is not None else None


def open_transport(
    name: str, timeout_s: float, device: torch.device, folder: Path, address: Address = own_address
) -> Transport:
    """Return the transport with this name in `weights.transport`, for a rank whose model is on `device`. `folder`:
    where transport "file" writes. `address`: as for `GroupTransport`."""
    if name == "file":
        return FileTransport(folder)
    return GroupTransport(name, timeout_s, device, address)
