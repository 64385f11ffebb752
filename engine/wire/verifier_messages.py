"""The messages between the launcher and a verifier process: msgpack frames over a socket pair; no pickle.

A frame is a length in 4 bytes (big endian) and that many bytes of msgpack. The process first sends `RewardLoaded` or
`RewardRefused`; then it answers each `ScoreCall` with `Scores` or `RewardFailed`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import replace

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


class ScoreCall(VerifierMessage):
    """A call of the reward. For a built-in one, which reads nothing else, only the first three fields are sent."""

    id: str
    answer: bytes
    texts: tuple[bytes, ...]
    """The responses' texts."""
    problem: bytes = b""
    token_ids: tuple[int, ...] = ()
    """The prompt's."""
    columns: bytes = b"{}"
    """As JSON, because integers may have more than the 64 bits of msgpack."""
    responses: tuple[Response, ...] = ()
    """The responses, with empty texts."""


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


EMPTY = Response(token_ids=(), logprobs=(), versions=(), loss_mask=(), finish_reason="", text="", seed=0, instance="")
AnyVerifierMessage = RewardLoaded | RewardRefused | ScoreCall | Scores | RewardFailed

_DECODER: msgspec.msgpack.Decoder[AnyVerifierMessage] = msgspec.msgpack.Decoder(AnyVerifierMessage)


def frame(message: VerifierMessage) -> bytes:
    """Return a message as one frame."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read(body: bytes) -> AnyVerifierMessage:
    """Return the message in `body`, a frame without its head."""
    return _DECODER.decode(body)


def call(prompt: Prompt, responses: Sequence[Response], text_only: bool) -> ScoreCall:
    """Return a call as a message. `text_only`: with only what built-in rewards read: id, answer, responses' texts."""
    texts = tuple(_encode_text(response.text) for response in responses)
    answer = _encode_text(prompt.answer)
    if text_only:
        return ScoreCall(prompt.id, answer, texts)
    return ScoreCall(
        id=prompt.id,
        answer=answer,
        texts=texts,
        problem=_encode_text(prompt.problem),
        token_ids=prompt.token_ids,
        columns=json.dumps(dict(prompt.columns)).encode(),
        responses=tuple(replace(response, text="") for response in responses),
    )


def arguments(message: ScoreCall) -> tuple[Prompt, list[Response]]:
    """Return the arguments of the reward: prompt and responses. Fields that were not sent are empty."""
    prompt = Prompt(
        id=message.id,
        problem=_decode_text(message.problem),
        answer=_decode_text(message.answer),
        token_ids=message.token_ids,
        columns=json.loads(message.columns),
    )
    responses = message.responses or (EMPTY,) * len(message.texts)
    return prompt, [
        replace(response, text=_decode_text(text)) for response, text in zip(responses, message.texts, strict=True)
    ]


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
