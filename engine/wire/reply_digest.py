"""The digest that protects a response on its way from an instance to the orchestrator (docs/protocol.md, Completions).

This module needs only the standard library and xxhash, since it also runs in vLLM's environment.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import xxhash

Versions = Sequence[Sequence[int]]
"""[index of its first token, weight version] for each stretch of tokens."""


def compute_digest(
    token_ids: Sequence[int], logprobs: Sequence[float], versions: Versions, finish_reason: str, routes: bytes = b""
) -> str:
    """Return the XXH3 digest (128 bits, 32 hexadecimal digits) of everything in a response that training uses.

    The digest covers the token ids, the log-probabilities and the pairs of `versions`, 8 bytes per number (signed
    integers, IEEE 754 doubles, both little-endian), then the finish reason in UTF-8 and the bytes of the routes, if
    any. Raises OverflowError for an integer that does not fit.
    """
    return packed_digest(array("q", token_ids), array("d", logprobs), versions, finish_reason, routes=routes)


def packed_digest(
    token_ids: array[int], logprobs: array[float], versions: Versions, finish_reason: str, routes: bytes = b""
) -> str:
    """Like `compute_digest`, for numbers that are already packed."""
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
