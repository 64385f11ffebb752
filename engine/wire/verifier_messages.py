"""What launcher and verifier process say to each other: msgpack frames over a socket pair, no pickle.

A frame is 4 bytes of length (big endian) and that many of msgpack. The process first sends `RewardLoaded` or
`RewardRefused`; then it answers each `ScoreTexts` or `ScoreGroup` with `Scores` or `RewardFailed`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

import msgspec

from engine.types import Prompt, Response, Score
from engine.wire.messages import PROTOCOL

LENGTH = struct.Struct(">I")
"""The head of a frame."""


class VerifierMessage(msgspec.Struct, tag=True, array_like=True):
    """A message of either side. Texts travel as bytes: a response may end in half a character."""


class RewardLoaded(VerifierMessage):
    """The process is ready for calls."""

    per_response: bool
    """Whether the reward takes one response per call."""
    protocol: int = PROTOCOL


class RewardRefused(VerifierMessage):
    """The reward can't be loaded; the process ends."""

    message: str


class ScoreTexts(VerifierMessage):
    """A call of a built-in reward, with what these read."""

    id: str
    answer: bytes
    texts: tuple[bytes, ...]


class ScoredResponse(msgspec.Struct, frozen=True, array_like=True):
    """engine.types.Response, with its text as bytes."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]
    loss_mask: tuple[bool, ...]
    finish_reason: str
    text: bytes
    seed: int
    instance: str


class ScoreGroup(VerifierMessage):
    """A call of a user's reward."""

    id: str
    problem: bytes
    answer: bytes
    token_ids: tuple[int, ...]
    columns: bytes
    """JSON, which has integers of any size; msgpack stops at 64 bits."""
    responses: tuple[ScoredResponse, ...]


class Scores(VerifierMessage):
    """One score for each response, in order: value, status, detail."""

    scores: tuple[tuple[float, str, bytes], ...]

    @staticmethod
    def of(scores: Sequence[Score]) -> Scores:
        """As a message."""
        return Scores(tuple((score.value, score.status, _bytes(score.detail)) for score in scores))

    def opened(self) -> list[Score]:
        """The inverse of `of`."""
        return [Score(value, status, _text(detail)) for value, status, detail in self.scores]


class RewardFailed(VerifierMessage):
    """The reward raised, or returned something that is no score for each response."""

    message: str


Call = ScoreTexts | ScoreGroup
Reply = RewardLoaded | RewardRefused | Scores | RewardFailed

_DECODER: msgspec.msgpack.Decoder[Call | Reply] = msgspec.msgpack.Decoder(Call | Reply)


def frame(message: VerifierMessage) -> bytes:
    """A message as one frame."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read(body: bytes) -> Call | Reply:
    """The message of a frame, without its head."""
    return _DECODER.decode(body)


def call(prompt: Prompt, responses: Sequence[Response], text_only: bool) -> Call:
    """A call as a message; `text_only` sends what the built-in verifiers read: id, answer and the responses' texts."""
    if text_only:
        return ScoreTexts(prompt.id, _bytes(prompt.answer), tuple(_bytes(response.text) for response in responses))
    return ScoreGroup(
        id=prompt.id,
        problem=_bytes(prompt.problem),
        answer=_bytes(prompt.answer),
        token_ids=prompt.token_ids,
        columns=json.dumps(dict(prompt.columns)).encode(),
        responses=tuple(_packed(response) for response in responses),
    )


def arguments(message: Call) -> tuple[Prompt, list[Response]]:
    """What the reward is called with; fields that were not sent are empty."""
    if isinstance(message, ScoreTexts):
        return Prompt(message.id, "", _text(message.answer), ()), [_of_text(text) for text in message.texts]
    prompt = Prompt(
        id=message.id,
        problem=_text(message.problem),
        answer=_text(message.answer),
        token_ids=message.token_ids,
        columns=json.loads(message.columns),
    )
    return prompt, [_opened(response) for response in message.responses]


def _packed(response: Response) -> ScoredResponse:
    return ScoredResponse(
        token_ids=response.token_ids,
        logprobs=response.logprobs,
        versions=response.versions,
        loss_mask=response.loss_mask,
        finish_reason=response.finish_reason,
        text=_bytes(response.text),
        seed=response.seed,
        instance=response.instance,
    )


def _opened(response: ScoredResponse) -> Response:
    return Response(
        token_ids=response.token_ids,
        logprobs=response.logprobs,
        versions=response.versions,
        loss_mask=response.loss_mask,
        finish_reason=response.finish_reason,
        text=_text(response.text),
        seed=response.seed,
        instance=response.instance,
    )


def _of_text(text: bytes) -> Response:
    return Response(
        token_ids=(), logprobs=(), versions=(), loss_mask=(), finish_reason="", text=_text(text), seed=0, instance=""
    )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
