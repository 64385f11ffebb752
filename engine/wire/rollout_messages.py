"""The orchestrator's requests to a rollout instance, and the fields that it reads from the replies (docs/protocol.md).

Each is a struct; bodies are JSON. A reply may have further fields. An error about a missing or wrongly typed field
names the field. Instances do not use these structs to check requests, since any client may send them: see
engine.instance.protocol.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Generic, Literal, TypeVar

import msgspec

from engine.types import JsonObject
from engine.wire.messages import BucketInfo, MeetingPlace

if TYPE_CHECKING:
    import aiohttp

Reply = TypeVar("Reply")

ROLLOUT_PROTOCOL = 3
"""Version of the rollout protocol. It rises with every change after which an orchestrator and an instance of different
releases would misunderstand each other."""

REPLY_BYTES = 2**20
"""Largest reply to any request but a completion. GET /status of a large pool is the longest."""
TOKEN_REPLY_BYTES = 512
"""Bytes allowed for one token of prompt or response in the reply to a completion, without its routes."""

COLUMNS_TYPE = "application/vnd.metronome.columns"
"""Media type of a reply to /v1/completions with its numbers as bytes (docs/protocol.md, Completions). It is a third of
the size of JSON, and the numbers need no parsing."""
NUMBER_BYTES = 8


async def read_answer(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body of an answer. Raises ValueError if it has more than `most` bytes or is compressed, because it
    could then become any size. Nothing beyond the limit is read."""
    if (coding := answer.headers.get("Content-Encoding", "identity")) != "identity":
        raise ValueError(f"it is compressed (Content-Encoding {coding!r:.50}), which was not asked for")
    if (answer.content_length or 0) > most:
        raise ValueError(f"it has {answer.content_length:,} bytes, and at most {most:,} are expected")
    parts: list[bytes] = []
    size = 0
    while part := await answer.content.readany():
        parts.append(part)
        size += len(part)
        if size > most:
            raise ValueError(f"it has more than the {most:,} bytes that are expected at most")
    return b"".join(parts)


def write_columns(head: JsonObject, token_ids: array[int], logprobs: array[float]) -> bytes:
    """Return the reply: `head` as JSON and a line feed, then the token ids ("q") and the log-probabilities ("d"), 8
    bytes per number, little-endian."""
    return b"".join((json.dumps(head).encode(), b"\n", _little_endian(token_ids), _little_endian(logprobs)))


def read_columns(body: bytes) -> tuple[bytes, array[int], array[float]]:
    """The inverse of `write_columns`, with the head still encoded. Raises ValueError unless there are as many token ids
    as log-probabilities."""
    head, _, numbers = body.partition(b"\n")
    count, rest = divmod(len(numbers), 2 * NUMBER_BYTES)
    if rest:
        raise ValueError(f"{len(numbers)} bytes of numbers, expected {2 * NUMBER_BYTES} for each token")
    token_ids = array("q", numbers[: count * NUMBER_BYTES])
    logprobs = array("d", numbers[count * NUMBER_BYTES :])
    if sys.byteorder == "big":
        token_ids.byteswap()
        logprobs.byteswap()
    return head, token_ids, logprobs


def _little_endian(numbers: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


class Acknowledged(msgspec.Struct):
    """A reply whose status says all: the request was carried out. Its body is not read."""


class Health(msgspec.Struct):
    """The reply of an instance whose model is loaded and whose engine is alive."""

    protocol: int | None = None
    """Version of the rollout protocol that the instance speaks; None if the reply lacks it."""
    world_size: int = 0
    """Number of the instance's processes that take part in a weight transfer."""


class Load(msgspec.Struct):
    """The load of an instance."""

    running: int
    """Responses being generated."""
    waiting: int
    """Responses waiting for a slot."""
    generated_tokens: int
    """Tokens sampled since the start."""
    weight_version: int
    """The version of the last finished update; 0 for the weights from disk."""


class Updated(msgspec.Struct):
    """The instance serves new weights."""

    weight_version: int
    """The version, as the processes that hold the weights say it."""
    logprobs: list[float] = []
    """The log-probabilities of the probe's tokens except the first, by the new weights."""


class Logprobs(msgspec.Struct):
    """Log-probabilities of a response's tokens."""

    token_logprobs: Sequence[float]


class TokenLogprob(msgspec.Struct):
    """Log-probability of a token of the prompt."""

    logprob: float


class Routes(msgspec.Struct):
    """The experts that computed the tokens of prompt and response, except the last token, which no layer has
    computed."""

    dtype: str
    """"uint8" for fewer than 256 experts in a layer, else "uint16"."""
    shape: tuple[int, ...]
    """(tokens, layers with experts, experts per token)."""
    data: bytes
    """In C order, little-endian; base64 in JSON."""


class Choice(msgspec.Struct):
    """A sampled response."""

    token_ids: Sequence[int]
    logprobs: Logprobs
    finish_reason: str
    prompt_logprobs: list[dict[str, TokenLogprob] | None] | None = None
    """One entry per token of the prompt, keyed by its id; None for the first token."""
    routes: Routes | None = None


class CompletionReply(msgspec.Struct):
    """The reply to a request for a response."""

    choices: Annotated[tuple[Choice, ...], msgspec.Meta(min_length=1)]
    weight_versions: tuple[tuple[int, int], ...] = ()
    """(index of its first token, weight version) for each stretch of tokens."""

    @staticmethod
    def of_columns(body: bytes) -> CompletionReply:
        """Read a reply with its numbers as bytes (`write_columns`). Raises msgspec.DecodeError or ValueError
        for anything else."""
        head, token_ids, logprobs = read_columns(body)
        reply = msgspec.json.decode(head, type=CompletionReply)
        reply.choices[0].token_ids = token_ids
        reply.choices[0].logprobs.token_logprobs = logprobs
        return reply


class InstanceRequest(msgspec.Struct, Generic[Reply]):
    """A request to one route. Its fields are the body; a GET has none."""

    method: ClassVar[str] = "POST"
    accept: ClassVar[str] = "application/json"
    route: ClassVar[str]
    reply: ClassVar[type[msgspec.Struct]] = Acknowledged

    @property
    def path(self) -> str:
        """The route, with its query."""
        return self.route

    @property
    def largest_reply(self) -> int:
        """Largest size of a reply in bytes."""
        return REPLY_BYTES


class GetHealth(InstanceRequest[Health]):
    """Asks whether the instance is alive."""

    method = "GET"
    route = "/health"
    reply = Health


class GetLoad(InstanceRequest[Load]):
    """Asks for the instance's load."""

    method = "GET"
    route = "/load"
    reply = Load


class Complete(InstanceRequest[CompletionReply], kw_only=True):
    """Asks for one sampled response to one prompt. The reply may have its numbers as bytes."""

    route = "/v1/completions"
    accept = f"{COLUMNS_TYPE}, application/json;q=0.5"
    reply = CompletionReply

    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | msgspec.UnsetType = msgspec.UNSET
    stop_token_ids: list[int] = []
    n: int = 1
    logprobs: int = 0
    return_token_ids: bool = True
    continued: int | msgspec.UnsetType = msgspec.UNSET
    """Number of the prompt's last tokens that belong to the response."""
    prompt_logprobs: int | msgspec.UnsetType = msgspec.UNSET
    """0 also requests the log-probabilities of the prompt's tokens."""
    routes: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether to return the experts of each token as well."""

    @property
    def largest_reply(self) -> int:
        """Largest size of a reply in bytes, without routes."""
        return REPLY_BYTES + TOKEN_REPLY_BYTES * (len(self.prompt) + self.max_tokens)


class Pause(InstanceRequest[Acknowledged]):
    """Makes the instance stop admitting requests. The reply arrives once nothing runs."""

    route = "/pause"

    mode: Literal["abort", "wait"]

    @property
    def path(self) -> str:
        """The route, with the mode as query."""
        return f"{self.route}?mode={self.mode}"


class Resume(InstanceRequest[Acknowledged]):
    """Makes the instance admit requests again."""

    route = "/resume"


class StartProfile(InstanceRequest[Acknowledged]):
    """Makes the instance start recording a profile."""

    route = "/start_profile"


class StopProfile(InstanceRequest[Acknowledged]):
    """Makes the instance write its profile."""

    route = "/stop_profile"


class InitInfo(msgspec.Struct, kw_only=True):
    """Where and how an instance joins the groups of a broadcast."""

    transport: str
    generation: int
    stages: list[MeetingPlace]
    """One address for each pipeline stage."""
    world_size: int
    rank: int
    """Rank of the instance's first process in each group."""
    timeout_s: float
    """Deadline of every wait in seconds."""


class Connect(InstanceRequest[Acknowledged]):
    """Makes the instance join the groups of the pipeline stages."""

    route = "/init_weight_transfer_engine"

    init_info: InitInfo


class BeginUpdate(Pause):
    """Makes the instance pause, and begin a weight update or restart it."""

    route = "/begin_weight_update"


class StagedWeights(msgspec.Struct, tag_field="transport", tag="staged"):
    """Names the version whose staged buckets are to be loaded."""

    version: int


class BaseWeights(msgspec.Struct, tag_field="transport", tag="base"):
    """Names the weights that the instance was started from, with the output rows of some tokens changed."""

    perturb: list[int]
    """Ids of the tokens whose output rows are changed."""


class Update(InstanceRequest[Acknowledged]):
    """Makes the instance receive and load weights, or begin to stage them."""

    route = "/update_weights"

    update_info: BucketInfo | StagedWeights | BaseWeights


class PoolState(msgspec.Struct):
    """The state of an instance in the orchestrator's pool, as named by GET /status."""

    state: str


class Join(InstanceRequest[PoolState], kw_only=True):
    """From an instance to the orchestrator: add this instance, or keep it."""

    route = "/join"
    reply = PoolState

    protocol: int
    name: str
    url: str
    """URL at which the orchestrator reaches the instance."""
    again: bool
    """Whether the instance was in the pool before."""
    token: str = ""
    """Access token that the instance requires; empty: the one with which it joins."""
    weights: str = ""
    """The hash of the folder from which it was started (engine.model.shape.content_hash), which evaluations compare."""


class Leave(InstanceRequest[PoolState]):
    """From an instance to the orchestrator: send no new requests."""

    route = "/leave"
    reply = PoolState

    name: str


class PoolMember(msgspec.Struct):
    """An instance of the pool."""

    name: str


class PoolStatus(msgspec.Struct):
    """The instances of a run."""

    instances: list[PoolMember]


class GetStatus(InstanceRequest[PoolStatus]):
    """Asks the orchestrator for its instances."""

    method = "GET"
    route = "/status"
    reply = PoolStatus


class FinishUpdate(InstanceRequest[Updated]):
    """Ends the update: the instance's weights now have this version, and it serves them."""

    route = "/finish_weight_update"
    reply = Updated

    weight_version: int
    probe: Sequence[int] = ()
    """Tokens whose log-probabilities are requested."""
