"""The messages of a weight sync, from the trainer's publisher to the orchestrator, in this order."""

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
    """The instances that take part in a sync. They are now paused; with weights.staged they keep generating."""

    generation: int
    """Number of the groups' current membership; it rises when the groups must be rebuilt."""
    members: tuple[str, ...]
    """Names of the instances."""
    world_size: int
    """Number of ranks in the group of a pipeline stage, including its sender."""
    connect: bool
    """Whether the groups must be rebuilt."""
    local: bool
    """Whether all members are on the orchestrator's machine."""
    probe: tuple[int, ...]
    """Token ids whose log-probabilities are compared afterwards; empty if nothing is compared."""


class OpenSync(Request[SyncOpened]):
    """Begin a weight sync, or restart it."""

    version: int
    again: bool = False
    """Whether the version that was published last goes again to the instances that lack it (`messages.PublishAgain`).
    All others, and the rows of the step, stay as they are."""


class Proceed(Message):
    """A part of the sync is done. With `retry` it failed, and the sync restarts with `OpenSync`."""

    retry: bool = False


class MeetingPlace(msgspec.Struct, frozen=True):
    """The address at which the group of a pipeline stage meets."""

    host: str
    port: int


class ConnectSync(Request[Proceed]):
    """Make all members join the stages' groups."""

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
    """Whether to receive it into host memory while generation continues."""

    @property
    def title(self) -> str:
        """Which part of which update this is, for messages."""
        return f"weight version {self.version}, bucket {self.bucket} of stage {self.stage}"


class SendBucket(Request[Proceed]):
    """Make every member receive a bucket."""

    info: BucketInfo


class AbortSync(Request[Proceed]):
    """The sender failed to send, so the sync must restart."""

    version: int
    reason: str


class FinishSync(Request[Done]):
    """Make every member serve the version, at once or in the background."""

    version: int


class VerifySync(Request[Done]):
    """Compare the members' log-probabilities of the probe with `expected`, the trainer's; if empty, compare nothing."""

    expected: tuple[float, ...]
