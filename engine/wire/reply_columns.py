"""A reply to /v1/completions with its numbers as bytes (docs/protocol.md, Completions). It is a third of the size of
JSON, and the numbers need no parsing.

This module needs only the standard library, since it is also used in vLLM's environment.
"""

from __future__ import annotations

import json
import sys
from array import array

from engine.types import JsonObject

CONTENT_TYPE = "application/vnd.metronome.columns"
NUMBER_BYTES = 8


def write_reply(head: JsonObject, token_ids: array[int], logprobs: array[float]) -> bytes:
    """Return the reply: `head` as JSON and a line feed, then the token ids ("q") and the log-probabilities ("d"), 8
    bytes per number, little-endian."""
    return b"".join((json.dumps(head).encode(), b"\n", _little_endian(token_ids), _little_endian(logprobs)))


def read_reply(body: bytes) -> tuple[bytes, array[int], array[float]]:
    """The inverse of `write_reply`, with the head still encoded. Raises ValueError unless there are as many token ids
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
