"""The messages of the plane: what stages ask the orchestrator's server (POST /ask), its replies, and what the ranks of
a stage say to each other. One struct for each.

A request names its reply: `Lease` is a `Request[Work]`. `Plane.answers` says which method answers it. Messages are
msgpack. Reading one raises an error if a field is unknown, missing or of another type.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.types import BatchScores, StepFigures
from engine.wire.columns import Column, PackedLanded, PackedResponse, Row
from engine.wire.message import Done, Failure, Message, Request
from engine.wire.store_addresses import StoreAddresses
from engine.wire.sync_messages import (
    AbortSync,
    ConnectSync,
    FinishSync,
    IsSnapshotWanted,
    MayPublish,
    OpenSync,
    Proceed,
    PublishAllowed,
    SendBucket,
    SnapshotWanted,
    SyncOpened,
    VerifySync,
)

PROTOCOL = 7
"""Version of these messages and of verifier_messages. It rises when a message changes; both ends must have the same."""
PROTOCOL_HEADER = "Metronome-Protocol"
"""HTTP header of each request with the client's `PROTOCOL`."""
OURS_HEADER = "Metronome-Ours"
"""HTTP header of the requests of a run's own ranks. It is no secret: it keeps a program's mistake from a run that has a
trainer of its own."""
CONTENT_TYPE = "application/msgpack"
"""Media type of requests and replies."""
TRAIN = "train"
"""The stage that consumes the rows and moves the weights."""

# rows, as a stage goes through them ---------------------------------------------------------------


class Window(Message):
    """Rows for a stage."""

    step: int
    rows: tuple[Row, ...]
    batch: BatchScores | None = None
    """The scores of the whole batch, if the advantages depend on them."""
    lease: int = 0
    """Number of the lease, from 1, by which the rows are acknowledged (`Lease.done`)."""
    lease_s: float | None = None
    """Seconds after which the rows may be given again; None: the lease lasts as long as the ranks that hold it."""
    deliveries: int = 1
    """How often the rows were given, this time included."""
    store: StoreAddresses | None = None
    """Where the bodies of the columns lie; None: they are here."""


class EarlyWork(Message):
    """Responses to score early, while there is nothing to train."""

    landed: tuple[PackedLanded, ...]


class StillWaiting(Message):
    """A sign of life of the orchestrator, which has nothing to give yet: ask again."""


class EndOfStep(Message):
    """The stage is through with all rows of the step."""

    prompt_position: int | None = None
    """With dynamic sampling: position at which the next step's prompts begin; else None."""


class EndOfRun(Message):
    """The last step is trained: no stage has anything left to do."""


Work = Window | EarlyWork | EndOfStep | EndOfRun | StillWaiting


class Lease(Request[Work]):
    """Acknowledge the windows that a stage is through with, and ask what it does next."""

    budget: int
    """The largest number of tokens of a window, which always has one row; 0: nothing more is asked for."""
    stage: str = TRAIN
    step: int | None = None
    """Of which step; None: of the oldest that has something to do."""
    done: tuple[int, ...] = ()
    """Numbers of the leases whose rows the stage is through with since the last request."""
    columns: tuple[str, ...] = ()
    """Names of the columns to give; empty: all that the stage needs."""
    consumer: str = ""
    """Name of a program outside, for messages."""
    ahead: bool = False
    """Whether the unit still trains its last window. It gets none that another unit would begin sooner."""
    early: bool = False
    """Whether the stage scores responses early (`EarlyWork`)."""
    fetches: bool = False
    """Whether the unit can fetch the bodies of columns itself (`Window.store`)."""
    unfetched: int | None = None
    """Number of a lease whose bodies the unit could not fetch. A later reply is its window with them."""


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The columns that a stage gives a row."""

    index: int
    columns: tuple[Column, ...]


class Taken(Message):
    """What was put or written is there."""

    new: bool
    """False if the same was there already."""


class WriteColumns(Request[Taken]):
    """Give rows of a lease the columns that its stage computes. Once all are written, the stage is through with it."""

    stage: str
    lease: int
    rows: tuple[Written, ...]


class PromptData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt of a program's own."""

    problem: str
    answer: str
    token_ids: bytes
    """int32."""
    columns: dict[str, Any] = {}
    """Further values that the reward reads."""
    text: str = ""
    """The prompt's text, if the reward reads it (engine.types.Prompt)."""


class PutPrompts(Request[Taken]):
    """Start a step: the responses to its prompts are sampled and scored in the background."""

    step: int
    prompts: tuple[PromptData, ...] | None = None
    """train.prompts_per_step prompts; None: the next ones of the recipe's data."""


class PutRow(Request[Taken]):
    """Put a group that was sampled and scored outside (data.pushed)."""

    row: Row


class Sampled(Message):
    """A response for each seed, with the weight versions of its tokens."""

    responses: tuple[PackedResponse, ...]


class SampleResponses(Request[Sampled]):
    """Sample responses to a prompt; no reward is computed."""

    prompt: bytes
    """int32."""
    seeds: tuple[int, ...]


class Heartbeat(Request[Done]):
    """A sign of life during work that needs no other request. The reply may be the failure that ends the run."""


class ReplayProgress(Request[EndOfStep | StillWaiting]):
    """A unit goes on with its replay of a step, or is done with it and waits for the others."""

    step: int
    done: bool


class AwaitVersion(Request[Done | StillWaiting]):
    """Ask whether every instance holds and has verified this weight version, or a later one."""

    version: int


# a run --------------------------------------------------------------------------------------------


class Engines(Message):
    """The engines are started; what a program needs to know of them."""

    config: str
    """The whole configuration, as JSON."""
    weights: str
    """Folder for weights on their way to the instances, where they travel as files."""
    version: int | None
    """The weight version that was published last; None before the first."""


class InitEngines(Request[Engines]):
    """Begin to use the plane."""


class Prompts(Message):
    """The fingerprint of the run's prompts, in their order; None for a replay, which has no prompts."""

    fingerprint: str | None


class Ready(Request[Prompts]):
    """The trainer has loaded its models and begins with step `start`."""

    start: int
    prompt_position: int | None
    """Number of prompts used before `start`, as the checkpoint says; None if it does not say."""
    prompts: str | None
    """The fingerprint of the run's prompts in the checkpoint; None if it has none."""
    units: int = 1
    """Number of units that take windows on their own."""


class Report(Request[Done]):
    """The figures of a step that has been trained, by the keys of steps.jsonl."""

    step: int
    figures: StepFigures


class StageFailed(Request[Done]):
    """A stage of ours ends with `error`, and with it the run."""

    error: Failure
    stage: str = TRAIN


def is_of_trainer(request: Request[Any]) -> bool:
    """Whether a request is the trainer's: it moves a step or the weights, and shows that the trainer lives."""
    if isinstance(request, Lease | WriteColumns | StageFailed):
        return request.stage == TRAIN
    return not isinstance(request, InitEngines | PutRow | SampleResponses | AwaitVersion | IsSnapshotWanted)


# among a stage's ranks ---------------------------------------------------------------------------


class CheckpointDue(Message):
    """Whether a checkpoint must be written, and how many updates the optimizer has made."""

    needed: bool
    updates: int


class CheckpointFound(Message):
    """Name of the newest complete checkpoint; None if there is none."""

    name: str | None


class ReferenceHash(Message):
    """Content hash of the reference model."""

    hash: str


AnyRequest = (
    InitEngines
    | PutPrompts
    | PutRow
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
    | IsSnapshotWanted
)
AnyMessage = (
    Failure
    | Done
    | Window
    | EarlyWork
    | StillWaiting
    | EndOfStep
    | EndOfRun
    | Taken
    | Sampled
    | Engines
    | Prompts
    | PublishAllowed
    | SyncOpened
    | SnapshotWanted
    | Proceed
    | CheckpointDue
    | CheckpointFound
    | ReferenceHash
)

_REQUESTS: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_MESSAGES: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def read_request(data: bytes) -> AnyRequest:
    """Return the request that `data` encodes. Raises msgspec.ValidationError for anything else."""
    return _REQUESTS.decode(data)


def read_message(data: bytes) -> AnyMessage:
    """Return the reply or ranks' message that `data` encodes. Raises msgspec.ValidationError for anything else."""
    return _MESSAGES.decode(data)
