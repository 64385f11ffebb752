"""The messages between the trainer and the launcher, and between the trainer's ranks: one struct for each.

A request names its reply: `Lease` is a `ControlRequest[Work]`. `Coordinator.answers` says which method answers it.
Messages are msgpack. Reading one raises an error if a field is unknown, missing or of another type.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from engine import errors
from engine.errors import MetronomeError
from engine.types import BatchScores, StepFigures
from engine.wire.codec import PackedLanded
from engine.wire.sealed import SealedGroup
from engine.wire.store_addresses import StoreAddresses

PROTOCOL = 4
"""Version of these messages and of verifier_messages. It rises when a message changes; both ends must have the same."""

ERRORS = {
    kind.__name__: kind
    for kind in (
        errors.BadInput,
        errors.StaleRolloutError,
        errors.RatioGapError,
        errors.Stopped,
        errors.DeadlineError,
        errors.TooManyFiles,
        errors.RewardError,
        errors.TakenOver,
        errors.CheckpointError,
        errors.DamagedCheckpointError,
        errors.DiskError,
        errors.ProcessDied,
        errors.StoreError,
        errors.TransferError,
        errors.ServiceConflict,
        errors.ServiceFull,
        errors.WeightSyncError,
        errors.MetronomeError,
    )
}
"""By name: the errors that a `Failure` can carry to another process."""

Answer = TypeVar("Answer")


class ControlRequest(
    msgspec.Struct, Generic[Answer], kw_only=True, tag=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A request of the trainer. Its reply is an `Answer` or a `Failure`."""

    unit: int | None = None
    """The unit that asks; None if rank 0 asks for all units."""


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """A reply of the launcher, or a message from one trainer rank to the others."""


class Failure(Message):
    """A MetronomeError on its way to another process."""

    kind: str
    """A key of ERRORS."""
    message: str

    @staticmethod
    def of(error: MetronomeError) -> Failure:
        """Return the error as a message. A class that is not in ERRORS becomes its nearest base class that is."""
        return Failure(next(one.__name__ for one in type(error).__mro__ if one in ERRORS.values()), str(error))

    def error(self) -> MetronomeError:
        """Return the error, to be raised in this process."""
        return ERRORS[self.kind](self.message)


class Done(Message):
    """What was asked for is done."""


# a step, as a unit goes through it ----------------------------------------------------------------


class Window(Message):
    """Groups to train."""

    groups: tuple[SealedGroup, ...]
    batch: BatchScores | None = None
    """The scores of the whole batch, if the advantages depend on them."""
    lease: int = 0
    """Number of the lease, from 1, by which the groups are acknowledged (`Lease.trained`)."""
    lease_s: float | None = None
    """Seconds after which the groups may be given again; None: the lease is bound to the trainer's attempt."""
    deliveries: int = 1
    """How often the groups were given, this time included."""
    store: StoreAddresses | None = None
    """Where the bodies of the groups lie; None: they are here."""


class EarlyWork(Message):
    """Responses to score early, while there is nothing to train."""

    landed: tuple[PackedLanded, ...]


class StillWaiting(Message):
    """A sign of life of the launcher, which has nothing to give yet: ask again."""


class EndOfStep(Message):
    """All groups of the step are trained."""


Work = Window | EarlyWork | EndOfStep | StillWaiting


class StartBatch(ControlRequest[Done]):
    """Start generating a step's batch in the background."""

    step: int


class Lease(ControlRequest[Work]):
    """Acknowledge trained windows, and ask what a unit, or a program outside, does next in the step."""

    step: int
    budget: int
    """The largest number of tokens of a window, which always has one group; 0: nothing more is asked for."""
    trained: tuple[int, ...]
    """Numbers of the leases whose groups were trained since the last request."""
    consumer: str = ""
    """Name of a program outside, for messages."""
    fetches: bool = False
    """Whether the unit can fetch the bodies of groups itself (`Window.store`)."""
    unfetched: int | None = None
    """Number of a lease whose bodies the unit could not fetch. A later reply is its window with them."""


class Heartbeat(ControlRequest[Done]):
    """A sign of life during work that needs no other request. The reply may be the failure that ends the run."""


class ReplayProgress(ControlRequest[EndOfStep | StillWaiting]):
    """A unit goes on with its replay of a step, or is done with it and waits for the others."""

    step: int
    done: bool


# a run --------------------------------------------------------------------------------------------


class Prompts(Message):
    """The fingerprint of the run's prompts, in their order; None for a replay, which has no prompts."""

    fingerprint: str | None


class Ready(ControlRequest[Prompts]):
    """The trainer has loaded its models and begins with step `start`."""

    start: int
    prompt_position: int | None
    """Number of prompts used before `start`, as the checkpoint says; None if it does not say."""
    prompts: str | None
    """The fingerprint of the run's prompts in the checkpoint; None if it has none."""


class Reported(Message):
    """The report was written."""

    prompt_position: int | None
    """With dynamic sampling: position at which the next step's prompts begin; else None."""


class Report(ControlRequest[Reported]):
    """The figures of a step that has been trained, by the keys of steps.jsonl."""

    step: int
    figures: StepFigures


class TrainerFailed(ControlRequest[Done]):
    """A unit ends with `error`."""

    error: Failure


# a weight sync ------------------------------------------------------------------------------------


class PublishAllowed(Message):
    """Whether weights may be published now; if not, the trainer asks again."""

    now: bool


class MayPublish(ControlRequest[PublishAllowed]):
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
    """Whether all members are on the launcher's machine."""
    probe: tuple[int, ...]
    """Token ids whose log-probabilities are compared afterwards; empty if nothing is compared."""


class OpenSync(ControlRequest[SyncOpened]):
    """Begin a weight sync, or begin it again."""

    version: int


class Proceed(Message):
    """A part of the sync is done. With `retry` it failed, and the sync begins again with `OpenSync`."""

    retry: bool = False


class MeetingPlace(msgspec.Struct, frozen=True):
    """The address at which the group of a pipeline stage meets."""

    host: str
    port: int


class ConnectSync(ControlRequest[Proceed]):
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


class SendBucket(ControlRequest[Proceed]):
    """Have every member receive a bucket."""

    info: BucketInfo


class AbortSync(ControlRequest[Proceed]):
    """The sender failed to send, so the sync must begin again."""

    version: int
    reason: str


class FinishSync(ControlRequest[Done]):
    """Have every member serve the version, at once or in the background."""

    version: int
    snapshot: str
    """Folder from which late instances load the version; empty if there is none."""


class VerifySync(ControlRequest[Done]):
    """Compare the members' log-probabilities of the probe with `expected`, the trainer's; empty: compare nothing."""

    expected: tuple[float, ...]


# among the trainer's ranks ------------------------------------------------------------------------


class CheckpointDue(Message):
    """Whether a checkpoint must be written, and how many updates the optimizer has made."""

    needed: bool
    updates: int


class CheckpointFound(Message):
    """Name of the newest complete checkpoint; None if there is none."""

    name: str | None


AnyRequest = (
    StartBatch
    | Lease
    | Heartbeat
    | ReplayProgress
    | Ready
    | Report
    | TrainerFailed
    | MayPublish
    | OpenSync
    | ConnectSync
    | SendBucket
    | AbortSync
    | FinishSync
    | VerifySync
)
AnyMessage = (
    Failure
    | Done
    | Window
    | EarlyWork
    | StillWaiting
    | EndOfStep
    | Prompts
    | Reported
    | PublishAllowed
    | SyncOpened
    | Proceed
    | CheckpointDue
    | CheckpointFound
)

_REQUESTS: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_MESSAGES: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)

pack = msgspec.msgpack.encode
"""Encode a message as bytes."""


def read_request(data: bytes) -> AnyRequest:
    """Return the request that `data` encodes. Raises msgspec.ValidationError for anything else."""
    return _REQUESTS.decode(data)


def read_message(data: bytes) -> AnyMessage:
    """Return the reply or rank message that `data` encodes. Raises msgspec.ValidationError for anything else."""
    return _MESSAGES.decode(data)
