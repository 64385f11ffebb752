"""The messages of the plane: what stages ask the orchestrator's server (POST /ask), its replies, and what the ranks of
a stage send each other. Each is a struct.

The base class of a request names its reply: `Lease` is a `Request[Work]`. `Plane.answers` says which method answers it.
Messages are encoded as msgpack. Decoding raises an error if a field is unknown, missing or of another type.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from engine import errors
from engine.errors import BadInput, MetronomeError
from engine.types import BatchScores, StepFigures
from engine.wire.columns import Column, PackedResponse, Row

PROTOCOL = 12
"""Version of these messages and of verifier_messages. It rises with every change of a message; both ends must have the
same."""
PROTOCOL_HEADER = "Metronome-Protocol"
"""HTTP header of each request, with the client's `PROTOCOL`."""
MOST_BYTES = 2**30
"""Largest body of a request, and largest size of the groups and prompts that programs have put and that are not trained
yet. A put beyond it is refused for now."""
CONTENT_TYPE = "application/msgpack"
"""Media type of requests and replies."""
TRAIN = "train"
"""The stage that consumes the rows and updates the weights."""

ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MetronomeError)
}
"""The errors that a `Failure` can carry to another process, by name."""

Answer = TypeVar("Answer")


class Request(msgspec.Struct, Generic[Answer], kw_only=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request of a stage. Its reply is an `Answer` or a `Failure`."""

    replica_group: int | None = None
    """The replica group that asks, of a run's own ranks; None if rank 0 asks for all replica groups, or if a program
    asks."""


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """A reply of the orchestrator, or a message from one rank of a stage to the others."""


class Failure(Message):
    """A MetronomeError sent to another process."""

    kind: str
    """A key of ERRORS."""
    message: str

    @staticmethod
    def of(error: MetronomeError) -> Failure:
        """Return the error as a message. A class that is not in ERRORS becomes its nearest base class in ERRORS."""
        return Failure(next(one.__name__ for one in type(error).__mro__ if one in ERRORS.values()), str(error))

    def error(self) -> MetronomeError:
        """Return the error, to raise it in this process."""
        return ERRORS[self.kind](self.message)


class Done(Message):
    """The request has been carried out."""


pack = msgspec.msgpack.encode
"""Encode a message as bytes."""

# how a stage works through rows -------------------------------------------------------------------


class Window(Message):
    """Rows for a stage to work on."""

    step: int
    rows: tuple[Row, ...]
    batch: BatchScores | None = None
    """The scores of the whole batch, if the advantages depend on them."""
    lease: int = 0
    """Number of the lease, from 1. It acknowledges the rows (`Lease.done`)."""
    lease_s: float | None = None
    """Seconds after which the rows may be leased again; None: the lease lasts as long as the ranks that hold it."""
    deliveries: int = 1
    """How often the rows have been leased, including this time."""


class StillWaiting(Message):
    """A sign of life: the orchestrator has no work yet, so ask again."""


class PublishAgain(Message):
    """Publish this version again (`OpenSync.again`): an instance lacks it, and the policy has not changed since. No
    lease of the step is held."""

    version: int


class EndOfStep(Message):
    """The stage has finished all rows of the step."""

    prompt_position: int | None = None
    """With dynamic sampling: position of the next step's first prompt; else None."""


class EndOfRun(Message):
    """The last step has been trained: no stage has work left."""


Work = Window | PublishAgain | EndOfStep | EndOfRun | StillWaiting


class Lease(Request[Work]):
    """Acknowledge the windows that a stage has finished, and ask for its next work."""

    budget: int
    """Most tokens in a window, which always has at least one row; 0: ask for no work."""
    stage: str = TRAIN
    step: int | None = None
    """Step to work on; None: the oldest step with work."""
    done: tuple[int, ...] = ()
    """Numbers of the leases that the stage has finished since the last request."""
    columns: tuple[str, ...] = ()
    """Names of the columns to return; empty: all that the stage needs."""
    consumer: str = ""
    """Name of an external program, for messages."""
    ahead: bool = False
    """Whether the replica group is still training its last window. If so, it gets no window that another replica group
    would begin sooner."""


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The columns that a stage writes to a row."""

    index: int
    columns: tuple[Column, ...]


class Taken(Message):
    """The rows or columns have been stored."""

    new: bool
    """False if the same content was stored before."""


class WriteColumns(Request[Taken]):
    """Write the columns that a stage computes to the rows of a lease. Once all are written, the stage has finished the
    lease."""

    stage: str
    lease: int
    rows: tuple[Written, ...]


class PromptData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt supplied by a program."""

    problem: str
    answer: str
    token_ids: bytes
    """int32."""
    columns: bytes = b"{}"
    """Further values that the reward reads, as a JSON object, which only the reward's process decodes."""
    text: str = ""
    """The prompt's text, if the reward reads it (engine.types.Prompt)."""


class PutPrompts(Request[Taken]):
    """Start a step: the responses to its prompts are sampled and scored in the background."""

    step: int
    prompts: tuple[PromptData, ...] | None = None
    """train.prompts_per_step prompts; None: the next ones from the recipe's data."""


class Sampled(Message):
    """One response per seed, with the weight versions of its tokens."""

    responses: tuple[PackedResponse, ...]


class SampleResponses(Request[Sampled]):
    """Sample responses to a prompt. No reward is computed."""

    prompt: bytes
    """int32."""
    seeds: tuple[int, ...]


class Heartbeat(Request[Done]):
    """A sign of life during work without other requests. The reply may be the failure that ends the run."""


class ReplayProgress(Request[EndOfStep | StillWaiting]):
    """A replica group is still replaying a step, or has finished it and waits for the others."""

    step: int
    done: bool


class AwaitVersion(Request[Done | StillWaiting]):
    """Ask whether every instance holds and has verified this weight version or a later one."""

    version: int


# a run --------------------------------------------------------------------------------------------


class Engines(Message):
    """The engines have started. This is what a program needs to know about them."""

    config: str
    """The whole configuration, as JSON."""
    weights: str
    """Folder for weights on their way to the instances, if they are sent as files."""
    version: int | None
    """The weight version published last; None before the first."""


class InitEngines(Request[Engines]):
    """Start using the plane."""


class Prompts(Message):
    """The fingerprint of the run's prompts in order; None for a replay, which has no prompts."""

    fingerprint: str | None


class Ready(Request[Prompts]):
    """The trainer has loaded its models and starts with step `start`."""

    start: int
    prompt_position: int | None
    """Number of prompts used before `start`, from the checkpoint; None if the checkpoint does not say."""
    prompts: str | None
    """Fingerprint of the run's prompts, from the checkpoint; None if the checkpoint has none."""
    replica_groups: int = 1
    """Number of replica groups that take windows independently."""
    notices: tuple[str, ...] = ()
    """What the run's user should see of the checkpoint from which the trainer goes on."""


class Report(Request[Done]):
    """The figures of a trained step, by the keys of steps.jsonl."""

    step: int
    figures: StepFigures
    advantages: dict[int, dict[int, float]] = {}
    """Of the step's responses, by the index of their group and their number in it."""


class StageFailed(Request[Done]):
    """A stage has failed with `error`, which ends the run."""

    error: Failure
    stage: str = TRAIN


# a weight sync, in this order -----------------------------------------------------------------------


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
    """Whether the version that was published last goes again to the instances that lack it (`PublishAgain`).
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
    checksum: str
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


# who may ask -----------------------------------------------------------------------------------------


def is_of_trainer(request: Request[Any]) -> bool:
    """Whether a request is the trainer's: one that advances a step or the weights, and so shows that the trainer is
    alive."""
    if isinstance(request, Lease | WriteColumns | StageFailed):
        return request.stage == TRAIN
    return not isinstance(request, InitEngines | SampleResponses | AwaitVersion)


FROM_PROGRAMS = (
    InitEngines,
    PutPrompts,
    Lease,
    WriteColumns,
    SampleResponses,
    Ready,
    Heartbeat,
    AwaitVersion,
    MayPublish,
    OpenSync,
    ConnectSync,
    SendBucket,
    AbortSync,
    FinishSync,
    VerifySync,
)
"""The requests that programs may send."""


def check_program(request: Request[Any], replica_groups: int, most: int) -> None:
    """Raise BadInput for a request that a program may not send.

    `replica_groups`: how many of them the program's trainer has; `most`: how many it may have.
    """
    name = type(request).__name__
    if not isinstance(request, FROM_PROGRAMS):
        raise BadInput(f"{name}: only the run's own ranks send this request")
    if (group := request.replica_group) is not None and not 0 <= group < replica_groups:
        raise BadInput(f"{name}.replica_group = {group}: the trainer has {replica_groups}, counted from 0")
    if isinstance(request, Ready):
        if not 1 <= request.replica_groups <= most:
            raise BadInput(f"{name}.replica_groups = {request.replica_groups}: expected 1 to {most}")
        if min(request.start, request.prompt_position or 0) < 0:
            raise BadInput(f"{name}: start and prompt_position can't be negative")


# between a stage's ranks -------------------------------------------------------------------------


class CheckpointDue(Message):
    """Whether a checkpoint must be written, and how many updates the optimizer has made."""

    needed: bool
    updates: int


class CheckpointFound(Message):
    """Name of the newest complete checkpoint; None if there is none."""

    name: str | None


AnyRequest = (
    InitEngines
    | PutPrompts
    | Lease
    | WriteColumns
    | SampleResponses
    | Heartbeat
    | ReplayProgress
    | Ready
    | Report
    | StageFailed
    | AwaitVersion
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
    | PublishAgain
    | StillWaiting
    | EndOfStep
    | EndOfRun
    | Taken
    | Sampled
    | Engines
    | Prompts
    | PublishAllowed
    | SyncOpened
    | Proceed
    | CheckpointDue
    | CheckpointFound
)

_REQUESTS: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_MESSAGES: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def read_request(data: bytes | bytearray) -> AnyRequest:
    """Return the request encoded in `data`. Raises msgspec.ValidationError for anything else."""
    return _REQUESTS.decode(data)


def read_message(data: bytes) -> AnyMessage:
    """Return the reply or rank message encoded in `data`. Raises msgspec.ValidationError for anything else."""
    return _MESSAGES.decode(data)
