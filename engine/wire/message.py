"""What all messages of the plane share: the base of requests and replies, and failures sent to another process."""

from __future__ import annotations

import re
from typing import Generic, TypeVar

import msgspec

from engine import errors
from engine.errors import BadInput, MetronomeError

ERRORS = {
    kind.__name__: kind
    for kind in (
        errors.BadInput,
        errors.StaleRolloutError,
        errors.RatioGapError,
        errors.Stopped,
        errors.DeadlineError,
        errors.TooManyFiles,
        errors.RewardError,
        errors.OutOfRoom,
        errors.TakenOver,
        errors.CheckpointError,
        errors.DamagedCheckpointError,
        errors.DiskError,
        errors.DeviceMemoryError,
        errors.ProcessDied,
        errors.StoreError,
        errors.TransferError,
        errors.ServiceConflict,
        errors.ServiceFull,
        errors.WeightsLost,
        errors.WeightSyncError,
        errors.MetronomeError,
    )
}
"""The errors that a `Failure` can carry to another process, by name."""

Answer = TypeVar("Answer")


class Request(msgspec.Struct, Generic[Answer], kw_only=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request of a stage. Its reply is an `Answer` or a `Failure`."""

    replica_group: int | None = None
    """The replica group that asks, of a run's own ranks; None if rank 0 asks for all replica groups, or if a program
    asks."""


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """A reply of the orchestrator, or a message from one rank of a stage to the others."""


class Failure(Message):
    """A MetronomeError sent to another process."""

    kind: str
    """A key of ERRORS."""
    message: str

    @staticmethod
    def of(error: MetronomeError) -> Failure:
        """Return the error as a message. A class that is not in ERRORS becomes its nearest base class in ERRORS."""
        return Failure(next(one.__name__ for one in type(error).__mro__ if one in ERRORS.values()), str(error))

    def error(self) -> MetronomeError:
        """Return the error, to raise it in this process."""
        return ERRORS[self.kind](self.message)


class Done(Message):
    """The request has been carried out."""


VALUES = 2**21
"""Most values in one request, of any kind and depth."""
VALUE_BYTES = 64
"""Memory that a decoded value takes besides its bytes: an empty list takes 56."""
WIDE = 3
"""Times its bytes that a text beyond ASCII takes besides them: one rare character makes all of them four bytes wide."""
_BEYOND_ASCII = re.compile(rb"[\x80-\xff]")
_COUNTS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""Bytes of the count of an array or a map, by its first byte."""
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length of bytes, an extension or a text."""
_SIZES = dict(zip(range(0xCA, 0xD9), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17), strict=True))
"""Bytes after the first one, of a number or a short extension."""


def measure_values(data: bytes | bytearray, most: int = VALUES) -> int:
    """Return the memory in bytes that a msgpack document takes, once decoded, besides its own bytes. Raises BadInput if
    it has more than `most` values. Nothing is decoded, and damage is left to the decoder."""
    at = 0
    found = 0
    wide = 0
    left = 1
    while left > 0 and at < len(data):
        kind = data[at]
        at += 1
        left -= 1
        found += 1
        if 0x80 <= kind < 0xA0:
            left += (kind & 15) * (1 if kind >= 0x90 else 2)
        elif 0xA0 <= kind < 0xC0:
            at += kind & 31
        elif kind in _COUNTS:
            left += int.from_bytes(data[at : at + _COUNTS[kind]]) * (1 if kind < 0xDE else 2)
            at += _COUNTS[kind]
        elif kind in _LENGTHS:
            length = int.from_bytes(data[at : at + _LENGTHS[kind]])
            at += _LENGTHS[kind] + (0xC7 <= kind <= 0xC9)
            if kind >= 0xD9 and _BEYOND_ASCII.search(data, at, at + length):
                wide += min(length, len(data) - at)
            at += length
        elif 0xC4 <= kind < 0xE0:
            at += _SIZES[kind]
        if found > most or left > most:
            raise BadInput(
                f"the body is not a request of the plane, which has at most {most:,} values: send it in several parts"
            )
    return VALUE_BYTES * found + WIDE * wide


pack = msgspec.msgpack.encode
"""Encode a message as bytes."""
