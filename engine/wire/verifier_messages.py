"""What launcher and verifier process say to each other: msgpack frames over a socket pair, no pickle.

A frame is 4 bytes of length (big endian) and that many of msgpack. The process first sends `{"per_response": bool}` or
`{"bad_input": str}`; then each call is answered by `{"scores": [[value, status, detail], …]}` or `{"error": str}`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import msgpack

from engine.types import Prompt, Response, Score

LENGTH = struct.Struct(">I")
"""The head of a frame."""


def pack(message: object) -> bytes:
    """One frame."""
    body = msgpack.packb(message, unicode_errors="surrogatepass")  # a response may end in half a character
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:  # noqa: ANN401
    """The message of a frame, without its head."""
    return msgpack.unpackb(body, unicode_errors="surrogatepass")


def call(prompt: Prompt, responses: Sequence[Response], text_only: bool) -> dict[str, Any]:
    """A call as a message; `text_only` sends what the built-in verifiers read: id, answer and the responses' texts."""
    if text_only:
        return {"id": prompt.id, "answer": prompt.answer, "texts": [response.text for response in responses]}
    # Columns travel as JSON, which has integers of any size; msgpack stops at 64 bits.
    fields = (prompt.id, prompt.problem, prompt.answer, prompt.token_ids, json.dumps(dict(prompt.columns)))
    return {"prompt": fields, "responses": [_fields(response) for response in responses]}


def parse_call(message: dict[str, Any]) -> tuple[Prompt, list[Response]]:
    """The other way; fields that were not sent are empty."""
    if "texts" in message:
        prompt = Prompt(message["id"], "", message["answer"], ())
        return prompt, [
            Response(
                token_ids=(), logprobs=(), versions=(), loss_mask=(), finish_reason="", text=text, seed=0, instance=""
            )
            for text in message["texts"]
        ]
    key, problem, answer, token_ids, columns = message["prompt"]
    responses = [_response(*fields) for fields in message["responses"]]
    return Prompt(
        id=key, problem=problem, answer=answer, token_ids=tuple(token_ids), columns=json.loads(columns)
    ), responses


def scores(message: dict[str, Any]) -> list[Score]:
    """The scores of an answer."""
    return [Score(*fields) for fields in message["scores"]]


def _fields(response: Response) -> tuple[object, ...]:
    return (
        response.token_ids,
        response.logprobs,
        response.versions,
        response.loss_mask,
        response.finish_reason,
        response.text,
        response.seed,
        response.instance,
    )


def _response(
    token_ids: list[int],
    logprobs: list[float],
    versions: list[list[int]],
    loss_mask: list[bool],
    *rest: Any,  # noqa: ANN401
) -> Response:
    runs = tuple((start, version) for start, version in versions)
    return Response(tuple(token_ids), tuple(logprobs), runs, tuple(loss_mask), *rest)
