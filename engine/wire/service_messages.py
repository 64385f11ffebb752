"""The messages between the service and programs outside, beside those of the trainer (engine.wire.messages): groups are
leased and acknowledged, and weights are published, with the trainer's own messages (docs/service.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.wire.codec import PackedResponse
from engine.wire.messages import (
    AbortSync,
    AnyMessage,
    ConnectSync,
    ControlRequest,
    Done,
    FinishSync,
    MayPublish,
    Message,
    OpenSync,
    SendBucket,
    StillWaiting,
    VerifySync,
)
from engine.wire.sealed import SealedGroup

SERVICE_PROTOCOL = 2
"""Version of these messages and of those of the trainer that the service takes. It rises when one of them changes."""
CONTENT_TYPE = "application/msgpack"
"""Media type of all requests and replies, GET /status excepted."""
SERVICE_FILE = "service.address"
"""File in the run folder with the host:port of the service."""


class EnginesReady(Message):
    """The engines are started; what a program needs to know of them."""

    config: str
    """The whole configuration, as JSON."""
    weights: str
    """Folder for weights on their way to the instances, where they travel as files."""
    version: int | None
    """The weight version that was published last; None before the first."""


class InitEngines(ControlRequest[EnginesReady]):
    """Begin to use the service."""

    protocol: int
    """The client's `SERVICE_PROTOCOL`."""


class PromptData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt of a program's own."""

    problem: str
    answer: str
    token_ids: bytes
    """int32."""
    columns: dict[str, Any] = {}
    """Further values that the reward reads."""


class Taken(Message):
    """What was put is there."""

    new: bool
    """False if the same was there already."""


class PutPrompts(ControlRequest[Taken]):
    """Have the responses to a step's prompts sampled and scored."""

    step: int
    prompts: tuple[PromptData, ...] | None = None
    """train.prompts_per_step prompts; None: the next ones of the recipe's data."""


class PutGroup(ControlRequest[Taken]):
    """Put a group that was sampled and scored outside. The step's other groups come the same way."""

    group: SealedGroup


class Sampled(Message):
    """A response for each seed, with the weight versions of its tokens."""

    responses: tuple[PackedResponse, ...]


class SampleResponses(ControlRequest[Sampled]):
    """Sample responses to a prompt; no reward is computed."""

    prompt: bytes
    """int32."""
    seeds: tuple[int, ...]


class AwaitVersion(ControlRequest[Done | StillWaiting]):
    """Ask whether every instance holds and has verified this weight version, or a later one."""

    version: int


SyncRequest = MayPublish | OpenSync | ConnectSync | SendBucket | AbortSync | FinishSync | VerifySync
"""The parts of a publish, in their order."""

_REPLIES: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(AnyMessage | EnginesReady | Taken | Sampled)


def read_reply(data: bytes) -> Message:
    """Return the reply that `data` encodes. Raises msgspec.ValidationError for anything else."""
    return _REPLIES.decode(data)
