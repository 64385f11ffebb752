"""A response as bytes, its numbers as raw buffers: so the launcher keeps it from its arrival on; no pickle."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.types import Landed, Response

ID_BYTES = 4
"""Bytes of a token id (int32)."""

Decode = Callable[[Sequence[int]], str]
"""Gives the text of token ids."""


class PackedResponse(msgspec.Struct, frozen=True):
    """An engine.types.Response as it came from an instance: its numbers as buffers, and no text, which is decoded where
    it is read."""

    token_ids: bytes
    """int32."""
    logprobs: bytes
    """fp32."""
    versions: tuple[tuple[int, int], ...]
    loss_mask: bytes
    """One byte for each token."""
    finish_reason: str
    seed: int
    instance: str

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.token_ids) // ID_BYTES


class PackedLanded(msgspec.Struct, frozen=True, array_like=True):
    """An engine.types.Landed, its numbers packed as buffers."""

    step: int
    group: int
    number: int
    prompt: bytes
    """int32."""
    token_ids: bytes
    """int32."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the response and its prompt."""
        return (len(self.prompt) + len(self.token_ids)) // ID_BYTES


def pack_response(response: Response) -> PackedResponse:
    """Pack a response: token ids as int32 buffers, log-probabilities as fp32 buffers, which loses nothing."""
    return PackedResponse(
        token_ids=pack_ids(response.token_ids),
        logprobs=array("f", response.logprobs).tobytes(),
        versions=response.versions,
        loss_mask=bytes(response.loss_mask),
        finish_reason=response.finish_reason,
        seed=response.seed,
        instance=response.instance,
    )


def open_response(packed: PackedResponse, decode: Decode | None = None) -> Response:
    """The inverse of `pack_response`; the text is that of `decode`, else empty."""
    token_ids = open_ids(packed.token_ids)
    return Response(
        token_ids=token_ids,
        logprobs=open_logprobs(packed.logprobs),
        versions=packed.versions,
        loss_mask=tuple(map(bool, packed.loss_mask)),
        finish_reason=packed.finish_reason,
        text=decode(token_ids) if decode is not None else "",
        seed=packed.seed,
        instance=packed.instance,
    )


def open_landed(packed: PackedLanded) -> Landed:
    """The response with its numbers as Python's."""
    return Landed(
        step=packed.step,
        group=packed.group,
        number=packed.number,
        prompt=open_ids(packed.prompt),
        token_ids=open_ids(packed.token_ids),
    )


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as an int32 buffer."""
    return array("i", token_ids).tobytes()


def open_ids(buffer: bytes) -> tuple[int, ...]:
    """The inverse of `pack_ids`."""
    return _numbers("i", buffer)


def open_logprobs(buffer: bytes) -> tuple[float, ...]:
    """The numbers of an fp32 buffer."""
    return _numbers("f", buffer)


def _numbers(kind: str, buffer: bytes) -> tuple[Any, ...]:
    return tuple(array(kind, buffer))
