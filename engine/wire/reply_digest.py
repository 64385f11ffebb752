"""The digest of a response on its way from an instance to the orchestrator (docs/protocol.md, Completions).

It needs the standard library and xxhash only, since it is also computed in vLLM's environment.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import xxhash

Versions = Sequence[Sequence[int]]
"""[index of its first token, weight version] of each stretch of tokens."""


def compute_digest(
    token_ids: Sequence[int], logprobs: Sequence[float], versions: Versions, finish_reason: str, routes: bytes = b""
) -> str:
    """XXH3 (128 bits, 32 hexadecimal digits) of all that is trained of a response.

    The bytes are those of the token ids, of the log-probabilities and of the pairs of `versions`, 8 for each number
    (signed integers, IEEE 754 doubles, both little-endian), then the finish reason in UTF-8 and the bytes of its routes
    if it has any. Raises OverflowError for an integer that needs more.
    """
    return packed_digest(array("q", token_ids), array("d", logprobs), versions, finish_reason, routes=routes)


def packed_digest(
    token_ids: array[int], logprobs: array[float], versions: Versions, finish_reason: str, routes: bytes = b""
) -> str:
    """`compute_digest` of numbers that are packed already."""
    found = xxhash.xxh3_128()
    for packed in (token_ids, logprobs, array("q", [number for pair in versions for number in pair])):
        found.update(packed if sys.byteorder == "little" else _swapped(packed))
    found.update(finish_reason.encode())
    found.update(routes)
    return found.hexdigest()


def _swapped(packed: array[int] | array[float]) -> array[int] | array[float]:
    other = packed[:]
    other.byteswap()
    return other
