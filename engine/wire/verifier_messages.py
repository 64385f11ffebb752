"""The messages between the launcher and a verifier process: msgpack frames over a socket pair; no pickle.

A frame is a length in 4 bytes (big endian) and that many bytes of msgpack. The process first sends `RewardLoaded` or
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
    """A message of either side. Texts are sent as bytes, because a response may end in half a character."""


class RewardLoaded(VerifierMessage):
    """The process is ready for calls."""

    per_response: bool
    """Whether the reward takes one response per call."""
    protocol: int = PROTOCOL


class RewardRefused(VerifierMessage):
    """The reward can't be loaded; the process ends."""

    message: str


class ScoreTexts(VerifierMessage):
    """A call of a built-in reward, with the fields that the built-in rewards read."""

    id: str
    answer: bytes
    texts: tuple[bytes, ...]


class ScoredResponse(msgspec.Struct, frozen=True, array_like=True):
    """An engine.types.Response, its text as bytes."""

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
    """As JSON, because integers may have more than the 64 bits of msgpack."""
    responses: tuple[ScoredResponse, ...]


class Scores(VerifierMessage):
    """One score for each response, in order: value, status, detail."""

    scores: tuple[tuple[float, str, bytes], ...]

    @staticmethod
    def of(scores: Sequence[Score]) -> Scores:
        """Return the scores as a message."""
        return Scores(tuple((score.value, score.status, _encode_text(score.detail)) for score in scores))

    def opened(self) -> list[Score]:
        """The inverse of `of`."""
        return [Score(value, status, _decode_text(detail)) for value, status, detail in self.scores]


class RewardFailed(VerifierMessage):
    """The reward raised, or did not return one score for each response."""

    message: str


Call = ScoreTexts | ScoreGroup
Reply = RewardLoaded | RewardRefused | Scores | RewardFailed

_DECODER: msgspec.msgpack.Decoder[Call | Reply] = msgspec.msgpack.Decoder(Call | Reply)


def frame(message: VerifierMessage) -> bytes:
    """Return a message as one frame."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read(body: bytes) -> Call | Reply:
    """Return the message in `body`, a frame without its head."""
    return _DECODER.decode(body)


def call(prompt: Prompt, responses: Sequence[Response], text_only: bool) -> Call:
    """Return a call as a message. `text_only`: with only what built-in rewards read: id, answer, responses' texts."""
    if text_only:
        return ScoreTexts(
            prompt.id, _encode_text(prompt.answer), tuple(_encode_text(response.text) for response in responses)
        )
    return ScoreGroup(
        id=prompt.id,
        problem=_encode_text(prompt.problem),
        answer=_encode_text(prompt.answer),
        token_ids=prompt.token_ids,
        columns=json.dumps(dict(prompt.columns)).encode(),
        responses=tuple(_pack_response(response) for response in responses),
    )


def arguments(message: Call) -> tuple[Prompt, list[Response]]:
    """Return the arguments of the reward: prompt and responses. Fields that were not sent are empty."""
    if isinstance(message, ScoreTexts):
        return Prompt(message.id, "", _decode_text(message.answer), ()), [
            _text_only_response(text) for text in message.texts
        ]
    prompt = Prompt(
        id=message.id,
        problem=_decode_text(message.problem),
        answer=_decode_text(message.answer),
        token_ids=message.token_ids,
        columns=json.loads(message.columns),
    )
    return prompt, [_open_response(response) for response in message.responses]


def _pack_response(response: Response) -> ScoredResponse:
    return ScoredResponse(
        token_ids=response.token_ids,
        logprobs=response.logprobs,
        versions=response.versions,
        loss_mask=response.loss_mask,
        finish_reason=response.finish_reason,
        text=_encode_text(response.text),
        seed=response.seed,
        instance=response.instance,
    )


def _open_response(response: ScoredResponse) -> Response:
    return Response(
        token_ids=response.token_ids,
        logprobs=response.logprobs,
        versions=response.versions,
        loss_mask=response.loss_mask,
        finish_reason=response.finish_reason,
        text=_decode_text(response.text),
        seed=response.seed,
        instance=response.instance,
    )


def _text_only_response(text: bytes) -> Response:
    return Response(
        token_ids=(),
        logprobs=(),
        versions=(),
        loss_mask=(),
        finish_reason="",
        text=_decode_text(text),
        seed=0,
        instance="",
    )


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
