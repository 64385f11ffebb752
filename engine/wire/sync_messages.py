"""The messages of a weight sync: what the trainer's publisher asks the orchestrator, in this order."""

from __future__ import annotations

import msgspec

from engine.wire.message import Done, Message, Request


class PublishAllowed(Message):
    """Whether weights may be published now; if not, the trainer asks again."""

    now: bool


class MayPublish(Request[PublishAllowed]):
    """Ask whether weights may be published now."""

    version: int


class SyncOpened(Message):
    """The instances that take part in a sync. They are paused now; with weights.staged they go on generating."""

    generation: int
    """Number of the groups' current set of members; it rises when groups must be made anew."""
    members: tuple[str, ...]
    """Names of the instances."""
    world_size: int
    """Number of ranks in the group of a pipeline stage, its sender included."""
    connect: bool
    """Whether the groups must be made anew."""
    local: bool
    """Whether all members are on the orchestrator's machine."""
    probe: tuple[int, ...]
    """Token ids whose log-probabilities are compared afterwards; empty if nothing is compared."""


class OpenSync(Request[SyncOpened]):
    """Begin a weight sync, or begin it again."""

    version: int


class Proceed(Message):
    """A part of the sync is done. With `retry` it failed, and the sync begins again with `OpenSync`."""

    retry: bool = False


class MeetingPlace(msgspec.Struct, frozen=True):
    """The address at which the group of a pipeline stage meets."""

    host: str
    port: int


class ConnectSync(Request[Proceed]):
    """Have all members join the stages' groups."""

    version: int
    transport: str
    stages: tuple[MeetingPlace, ...]


class BucketInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A bucket of weights: the update_info of /update_weights (docs/protocol.md)."""

    transport: str
    version: int
    stage: int
    bucket: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    checksums: list[str]
    path: str | None = None
    """Path of the bucket's file, with transport "file"."""
    staged: bool = False
    """Whether to receive it into host memory while generation goes on."""

    @property
    def title(self) -> str:
        """Which part of which update it is, for messages."""
        return f"weight version {self.version}, bucket {self.bucket} of stage {self.stage}"


class SendBucket(Request[Proceed]):
    """Have every member receive a bucket."""

    info: BucketInfo


class AbortSync(Request[Proceed]):
    """The sender failed to send, so the sync must begin again."""

    version: int
    reason: str


class FinishSync(Request[Done]):
    """Have every member serve the version, at once or in the background."""

    version: int
    snapshot: str
    """Folder from which late instances load the version, once it is there; empty if there is none."""


class VerifySync(Request[Done]):
    """Compare the members' log-probabilities of the probe with `expected`, the trainer's; empty: compare nothing."""

    expected: tuple[float, ...]


class SnapshotWanted(Message):
    """Whether a late instance waits for the snapshot; if not, the sender asks again."""

    now: bool


class IsSnapshotWanted(Request[SnapshotWanted]):
    """Ask whether a late instance waits for the snapshot of this version, which is written only then."""

    version: int
