"""What the launcher asks of a rollout instance, and what it takes of the replies (docs/protocol.md): a struct each.

Bodies are JSON. A reply may have more fields than these; one that is missing or of another type is refused by name.
An instance checks requests on its own (engine.instance.protocol): they come from outside.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Generic, Literal, TypeVar

import msgspec

from engine.wire.messages import BucketInfo, MeetingPlace

Reply = TypeVar("Reply")


class Acknowledged(msgspec.Struct):
    """It was done; nothing of the reply is looked at."""


class Health(msgspec.Struct):
    """The instance is there."""

    protocol: int | None = None
    """Version of the rollout protocol that it speaks; None: it does not say."""


class Load(msgspec.Struct):
    """What the instance does."""

    running: int
    waiting: int
    generated_tokens: int
    weight_version: int


class WeightVersion(msgspec.Struct):
    """Of the last finished update; 0 for the weights from disk."""

    weight_version: int


class WorldSize(msgspec.Struct):
    """Processes of the instance that take part in a transfer of weights."""

    world_size: int


class Logprobs(msgspec.Struct):
    """Of a response's tokens."""

    token_logprobs: tuple[float, ...]


class TokenLogprob(msgspec.Struct):
    """Of a token of the prompt."""

    logprob: float


class Choice(msgspec.Struct):
    """A sampled response."""

    token_ids: tuple[int, ...]
    logprobs: Logprobs
    finish_reason: str
    prompt_logprobs: list[dict[str, TokenLogprob] | None] | None = None
    """For each token of the prompt, by its id; None for the first."""


class CompletionReply(msgspec.Struct):
    """The reply to a request for a response."""

    choices: Annotated[tuple[Choice, ...], msgspec.Meta(min_length=1)]
    weight_versions: tuple[tuple[int, int], ...] = ()
    """(first token, version) of each stretch of tokens."""


class InstanceRequest(msgspec.Struct, Generic[Reply]):
    """A call to one route. Its fields are the body; a GET has none."""

    method: ClassVar[str] = "POST"
    route: ClassVar[str]
    reply: ClassVar[type[msgspec.Struct]] = Acknowledged

    @property
    def path(self) -> str:
        """Route and query."""
        return self.route


class GetHealth(InstanceRequest[Health]):
    """Is it there?"""

    method = "GET"
    route = "/health"
    reply = Health


class GetLoad(InstanceRequest[Load]):
    """What does it do?"""

    method = "GET"
    route = "/load"
    reply = Load


class GetWeightVersion(InstanceRequest[WeightVersion]):
    """Which version do its workers hold?"""

    method = "GET"
    route = "/weight_version"
    reply = WeightVersion


class GetWorldSize(InstanceRequest[WorldSize]):
    """How many of its processes receive weights?"""

    method = "GET"
    route = "/get_world_size"
    reply = WorldSize


class Complete(InstanceRequest[CompletionReply], kw_only=True):
    """Sample one response to one prompt."""

    route = "/v1/completions"
    reply = CompletionReply

    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_token_ids: list[int] = []
    n: int = 1
    logprobs: int = 0
    return_token_ids: bool = True
    continued: int | msgspec.UnsetType = msgspec.UNSET
    """So many of the prompt's last tokens are the response so far."""
    prompt_logprobs: int | msgspec.UnsetType = msgspec.UNSET
    """0: those of the prompt, too."""


class Pause(InstanceRequest[Acknowledged]):
    """Admit nothing; answered once nothing runs."""

    route = "/pause"

    mode: Literal["abort", "wait"]

    @property
    def path(self) -> str:
        """With the mode as its query."""
        return f"{self.route}?mode={self.mode}"


class Resume(InstanceRequest[Acknowledged]):
    """Admit again."""

    route = "/resume"


class ResetPrefixCache(InstanceRequest[Acknowledged]):
    """Forget computed prompts."""

    route = "/reset_prefix_cache"


class InitInfo(msgspec.Struct, kw_only=True):
    """Where an instance finds the groups of a broadcast."""

    transport: str
    generation: int
    stages: list[MeetingPlace]
    """One for each pipeline stage."""
    world_size: int
    rank: int
    """Of the instance's first process in each group."""
    timeout_s: float


class Connect(InstanceRequest[Acknowledged]):
    """Join the stages' groups."""

    route = "/init_weight_transfer_engine"

    init_info: InitInfo


class StartUpdate(InstanceRequest[Acknowledged]):
    """Begin an update of the weights, or begin it again."""

    route = "/start_weight_update"


class StagedWeights(msgspec.Struct, tag_field="transport", tag="staged"):
    """Load the buckets of a version that were staged."""

    version: int


class BaseWeights(msgspec.Struct, tag_field="transport", tag="base"):
    """Load what the instance was started from, with the output rows of some tokens changed."""

    perturb: list[int]


class Update(InstanceRequest[Acknowledged]):
    """Receive and load weights."""

    route = "/update_weights"

    update_info: BucketInfo | StagedWeights | BaseWeights


class FinishUpdate(InstanceRequest[Acknowledged]):
    """The update is whole: it is this version."""

    route = "/finish_weight_update"

    weight_version: int
