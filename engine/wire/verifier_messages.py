"""The messages between the orchestrator and a verifier process: msgpack frames over a socket pair, without pickle.

A frame is a mark of 4 bytes and a length in 4 bytes (big endian), followed by that many bytes of msgpack. First the
orchestrator sends `LoadTokenizer` and the process `RewardLoaded` or `RewardRefused`; after that the process answers
each `ScoreCall` with `Scores` or `RewardFailed`, which have the call's number. A reward may write to the process's
socket, so what arrives there is checked.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from engine.types import Prompt, Response, Score
from engine.wire.columns import Decode, JsonColumns, PackedResponse, open_ids, open_response, pack_ids, pack_response
from engine.wire.messages import PROTOCOL

HEADER = struct.Struct(">4sI")
"""The header of a frame: mark and length."""
MARK = b"\xc1mv\n"
"""The mark at the start of each frame. 0xc1 is in no text and no msgpack."""
MOST_ANSWER = 64 * 2**20
"""Largest size in bytes of a message from a verifier process."""
TOO_MANY_PROCESSES = 75
"""Exit status of a verifier process that was ended because its reward had too many processes."""


class WeightedFunction(msgspec.Struct, frozen=True, array_like=True):
    """One of a reward's functions. The score is the sum of weight times value over all of them."""

    function: str
    """"math", "file.py:function" …"""
    weight: float = 1.0
    name: str = ""
    """Name of its values among the score's metrics; empty for `reward.function`, whose value is the score."""
    program: bool = False
    """Whether it is `rollout.program` instead of a reward."""


def pack_functions(functions: Sequence[WeightedFunction]) -> str:
    """Return the functions as an argument of a verifier process."""
    return msgspec.json.encode(functions).decode()


def open_functions(argument: str) -> tuple[WeightedFunction, ...]:
    """The inverse of `pack_functions`."""
    return msgspec.json.decode(argument, type=tuple[WeightedFunction, ...])


class VerifierMessage(msgspec.Struct, tag=True, array_like=True):
    """A message from either side. Texts are sent as bytes, because a response may end in half a character."""


class LoadTokenizer(VerifierMessage):
    """What a process loads first: the tokenizer that decodes responses. Without `json`, every response is sent with its
    text."""

    json: bytes = b""
    """The model's tokenizer.json."""
    left_out: tuple[int, ...] = ()
    """Tokens left out of a response's text."""
    folder: str = ""
    """The model's folder, for the chat template."""
    variables: bytes = b"{}"
    """data.chat_template_kwargs, as JSON."""
    code: str = ""
    """Folder of copies of the user's code, from which it is loaded; empty: from the files themselves."""


class RewardLoaded(VerifierMessage):
    """The process is ready for calls."""

    per_response: bool
    """Whether the reward takes one response per call."""
    protocol: int = PROTOCOL


class RewardRefused(VerifierMessage):
    """The reward can't be loaded; the process ends."""

    message: str


class ScoreCall(VerifierMessage):
    """A call of the reward. Built-in rewards read only the answer and the responses' texts, so the rest is not sent to
    them."""

    id: str
    answer: bytes
    responses: tuple[PackedResponse, ...]
    texts: tuple[bytes | None, ...]
    """The text of each response; None: decode it from the token ids."""
    problem: bytes = b""
    text: bytes = b""
    token_ids: bytes = b""
    """The prompt's, int32."""
    columns: bytes = b"{}"
    """JSON, because integers may need more than the 64 bits of msgpack."""
    number: int = 0
    """Number of the call in its process."""


class Scores(VerifierMessage):
    """One score per response, in order: value, status, detail, whether it is excluded, whether it is correct,
    metrics."""

    scores: tuple[tuple[float, str, bytes, bool, bool | None, dict[str, float]], ...]
    number: int
    """The call's."""

    @staticmethod
    def of(scores: Sequence[Score], number: int) -> Scores:
        """Return the scores of a call as a message."""
        return Scores(tuple(map(_packed_score, scores)), number)

    def opened(self) -> list[Score]:
        """The inverse of `of`."""
        return [
            Score(
                value=value,
                status=status,
                detail=_decode_text(detail),
                excluded=excluded,
                correct=correct,
                metrics=metrics,
            )
            for value, status, detail, excluded, correct, metrics in self.scores
        ]


class RewardFailed(VerifierMessage):
    """The reward raised an error, or did not return one score per response."""

    message: str
    number: int
    """The call's."""


class BeginEpisode(VerifierMessage):
    """Run the program for one response. `prompt` is a call without responses."""

    number: int
    prompt: ScoreCall


class SampleTurn(VerifierMessage):
    """The program asks for a turn, after it has appended tokens."""

    number: int
    appended: bytes
    """int32."""
    stop: tuple[int, ...]
    """Tokens that end this turn, besides those that end every response."""
    max_new_tokens: int
    """0: as many as there is room for."""


class TurnSampled(VerifierMessage):
    """The turn. Without tokens there was no room for it."""

    number: int
    token_ids: bytes
    """int32."""
    finish_reason: str


class StopEpisode(VerifierMessage):
    """The response is no longer wanted."""

    number: int


class EpisodeOver(VerifierMessage):
    """The program has returned, or raised `error`. Without a score the reward scores the response."""

    number: int
    scores: Scores | None
    error: str
    rewritten: str = ""
    """How the chat template would have written an earlier turn that it rewrites; empty if it rewrites none."""


AnyVerifierMessage = (
    LoadTokenizer
    | RewardLoaded
    | RewardRefused
    | ScoreCall
    | Scores
    | RewardFailed
    | BeginEpisode
    | SampleTurn
    | TurnSampled
    | StopEpisode
    | EpisodeOver
)

_DECODER: msgspec.msgpack.Decoder[AnyVerifierMessage] = msgspec.msgpack.Decoder(AnyVerifierMessage)


def frame_message(message: VerifierMessage) -> bytes:
    """Return a message as one frame."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(MARK, len(body)) + body


def body_size(header: bytes) -> int:
    """Return the length in a frame's header. Raises ValueError if it has no mark."""
    mark, size = HEADER.unpack(header)
    if mark != MARK:
        raise ValueError(f"not a frame: {header!r}")
    return int(size)


def read_message(body: bytes) -> AnyVerifierMessage:
    """Return the message in `body`, a frame without its header. Raises ValueError if it is none."""
    try:
        return _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def make_score_call(prompt: Prompt, responses: Sequence[Response | PackedResponse], text_only: bool) -> ScoreCall:
    """Return a call as a message. `text_only`: include only what built-in rewards read: id, answer, responses'
    texts."""
    packed = tuple(pack_response(one) if isinstance(one, Response) else one for one in responses)
    texts = tuple(_encode_text(one.text) if isinstance(one, Response) else None for one in responses)
    answer = _encode_text(prompt.answer)
    if text_only:
        return ScoreCall(prompt.id, answer, tuple(map(_only_text, packed, texts)), texts)
    columns = prompt.columns
    return ScoreCall(
        id=prompt.id,
        answer=answer,
        responses=packed,
        texts=texts,
        problem=_encode_text(prompt.problem),
        text=_encode_text(prompt.text),
        token_ids=pack_ids(prompt.token_ids),
        columns=columns.raw if isinstance(columns, JsonColumns) else json.dumps(dict(columns)).encode(),
    )


def score_arguments(message: ScoreCall, decode: Decode) -> tuple[Prompt, list[Response]]:
    """Return the arguments of the reward: prompt and responses. Fields that were not sent are empty."""
    prompt = Prompt(
        id=message.id,
        problem=_decode_text(message.problem),
        answer=_decode_text(message.answer),
        token_ids=open_ids(message.token_ids),
        columns=json.loads(message.columns),
        text=_decode_text(message.text),
    )
    return prompt, [
        open_response(response, decode) if text is None else replace(open_response(response), text=_decode_text(text))
        for response, text in zip(message.responses, message.texts, strict=True)
    ]


def _packed_score(score: Score) -> tuple[float, str, bytes, bool, bool | None, dict[str, float]]:
    detail = _encode_text(score.detail)
    return score.value, score.status, detail, score.excluded, score.correct, dict(score.metrics)


def _only_text(response: PackedResponse, text: bytes | None) -> PackedResponse:
    """Return the response with only the fields needed to get its text."""
    token_ids = response.token_ids if text is None else b""
    return msgspec.structs.replace(response, token_ids=token_ids, logprobs=b"", loss_mask=b"", routes=b"")


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
