"""What the trainer and the launcher say to each other, and trainer ranks among each other: one struct a message.

A request names its reply: `Lease` is a `ControlRequest[Work]`. `Coordinator.answers` says which method answers it.
Messages are msgpack; a field that is unknown, missing or of another type is refused when the message is read.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from engine import errors
from engine.errors import MetronomeError
from engine.types import BatchScores, Score, StepFigures

PROTOCOL = 1
"""Version of these messages and of those of verifiers. It changes with every message; both ends must have the same."""

ERRORS = {
    kind.__name__: kind
    for kind in (
        errors.BadInput,
        errors.StaleRolloutError,
        errors.RatioGapError,
        errors.Stopped,
        errors.DeadlineError,
        errors.RewardError,
        errors.CheckpointError,
        errors.ProcessDied,
        errors.TransferError,
        errors.WeightSyncError,
        errors.MetronomeError,
    )
}
"""The errors that cross between processes, by the name that they cross under."""

Answer = TypeVar("Answer")


class ControlRequest(
    msgspec.Struct, Generic[Answer], kw_only=True, tag=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A request of the trainer, answered by an `Answer` or a `Failure`."""

    unit: int | None = None
    """The unit that asks; None where rank 0 asks for all."""


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """A reply, or what one rank tells the others."""


class Failure(Message):
    """An error of ours, on its way to another process."""

    kind: str
    """A key of ERRORS."""
    message: str

    @staticmethod
    def of(error: MetronomeError) -> Failure:
        """An error that only one process knows crosses as the nearest one that all know."""
        return Failure(next(one.__name__ for one in type(error).__mro__ if one in ERRORS.values()), str(error))

    def error(self) -> MetronomeError:
        """The error, to be raised here."""
        return ERRORS[self.kind](self.message)


class Done(Message):
    """It was done."""


# a step, as a unit goes through it ----------------------------------------------------------------


class PackedResponse(msgspec.Struct, frozen=True):
    """engine.types.Response with its numbers as buffers (engine.wire.codec)."""

    token_ids: bytes
    """int32."""
    logprobs: bytes
    """fp32."""
    versions: tuple[tuple[int, int], ...]
    loss_mask: bytes
    """A byte a token."""
    finish_reason: str
    text: str
    seed: int
    instance: str


class PackedGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """engine.types.Group. Of the prompt's columns nothing crosses: only the reward reads them, and it has run."""

    step: int
    index: int
    prompt: tuple[str, str, str, bytes]
    """Id, problem, answer, token ids (int32)."""
    responses: tuple[PackedResponse, ...]
    scores: tuple[Score, ...]
    advantages: tuple[float, ...] | None = None
    batch: BatchScores | None = None


class PackedLanded(msgspec.Struct, frozen=True, array_like=True):
    """engine.types.Landed."""

    step: int
    group: int
    number: int
    prompt: bytes
    """int32."""
    token_ids: bytes
    """int32."""


class Window(Message):
    """Groups to train."""

    groups: tuple[PackedGroup, ...]


class EarlyWork(Message):
    """Responses to score early, while there is nothing to train."""

    landed: tuple[PackedLanded, ...]


class StillWaiting(Message):
    """A sign of life: ask again."""


class EndOfStep(Message):
    """All groups of the step are trained."""


Work = Window | EarlyWork | EndOfStep | StillWaiting


class StartBatch(ControlRequest[Done]):
    """Start generating a step's batch in the background."""

    step: int


class Lease(ControlRequest[Work]):
    """What a unit has to do next in a step."""

    step: int
    budget: int
    """Tokens of a window."""
    trained: tuple[int, ...]
    """Indices of the groups whose gradients are in since the last request."""


class Heartbeat(ControlRequest[Done]):
    """The unit is at work that asks for nothing. The reply may be the failure that ends the run."""


class ReplayProgress(ControlRequest[EndOfStep | StillWaiting]):
    """A unit goes on with its replay of a step, or is done with it and waits for the others."""

    step: int
    done: bool


# a run --------------------------------------------------------------------------------------------


class Prompts(Message):
    """The run's prompts in their order, by fingerprint; None for a replay, which draws none."""

    fingerprint: str | None


class Ready(ControlRequest[Prompts]):
    """The trainer has loaded its models and begins with step `start`."""

    start: int
    prompt_position: int | None
    """Prompts used before it, of the checkpoint; None where the checkpoint does not say."""
    prompts: str | None
    """Their fingerprint, of the checkpoint."""


class Reported(Message):
    """The report was written."""

    prompt_position: int | None
    """Where the next step's prompts begin, with dynamic sampling."""


class Report(ControlRequest[Reported]):
    """The figures of a step that is trained, by the keys of steps.jsonl."""

    step: int
    figures: StepFigures


class TrainerFailed(ControlRequest[Done]):
    """A unit ends with this error."""

    error: Failure


# a weight sync ------------------------------------------------------------------------------------


class PublishAllowed(Message):
    """Whether weights may move now; if not, the trainer asks again."""

    now: bool


class MayPublish(ControlRequest[PublishAllowed]):
    """May weights move?"""

    version: int


class SyncOpened(Message):
    """The instances that take part in a sync, which are paused now (or receive beside their work, staged)."""

    generation: int
    members: tuple[str, ...]
    world_size: int
    """Ranks of a stage's group, its sender included."""
    connect: bool
    """Whether groups must be made anew."""
    local: bool
    """Whether all members are on the launcher's machine."""
    probe: tuple[int, ...]
    """Token ids whose log-probabilities are compared afterwards; empty for none."""


class OpenSync(ControlRequest[SyncOpened]):
    """Begin a weight sync, or begin it again."""

    version: int


class Proceed(Message):
    """A part of the sync was done; with `retry` an instance failed, and the sync begins again with `OpenSync`."""

    retry: bool = False


class MeetingPlace(msgspec.Struct, frozen=True):
    """Where the group of a pipeline stage meets."""

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
    """Of its file, with transport file."""
    staged: bool = False
    """Receive it into host memory while generation goes on."""
    packed: bool = False
    """With hccl: that tensors are packed, into pieces of this many bytes."""
    packed_buffer_size_bytes: int = 0

    @property
    def title(self) -> str:
        """Which part of which update it is, for messages."""
        return f"weight version {self.version}, bucket {self.bucket} of stage {self.stage}"


class SendBucket(ControlRequest[Proceed]):
    """Have every member receive a bucket."""

    info: BucketInfo


class AbortSync(ControlRequest[Proceed]):
    """The sender could not send: the sync begins again."""

    version: int
    reason: str


class FinishSync(ControlRequest[Done]):
    """Have every member serve the version, or begin to in the background."""

    version: int
    snapshot: str
    """Folder from which late instances load it."""


class VerifySync(ControlRequest[Done]):
    """The trainer's log-probabilities of the probe, to compare the members' with; empty: it has none."""

    expected: tuple[float, ...]


# among the trainer's ranks ------------------------------------------------------------------------


class CheckpointDue(Message):
    """Whether a checkpoint must be written, and how many updates the optimizer has made."""

    needed: bool
    updates: int


class CheckpointFound(Message):
    """The newest complete checkpoint's name; None: there is none."""

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
"""A message as bytes."""


def read_request(data: bytes) -> AnyRequest:
    """The request in these bytes. Raises msgspec.ValidationError for anything else."""
    return _REQUESTS.decode(data)


def read_message(data: bytes) -> AnyMessage:
    """The reply in these bytes, or what a rank told. Raises msgspec.ValidationError for anything else."""
    return _MESSAGES.decode(data)
