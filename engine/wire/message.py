"""What all messages of the plane share: the base of requests and replies, and failures sent to another process."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from engine import errors
from engine.errors import MetronomeError

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


pack = msgspec.msgpack.encode
"""Encode a message as bytes."""
