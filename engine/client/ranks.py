"""Ranks of a trainer for the plane's client: a single process, or several data-parallel processes of plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import msgspec
import torch
import torch.distributed as dist

from engine.errors import MetronomeError
from engine.wire.messages import Failure, Message, pack, read_message

M = TypeVar("M", bound=Message)
S = TypeVar("S", bound=msgspec.Struct)


class Ranks:
    """A rank of a trainer, with a channel on the host over which the ranks agree; here the only one, of a trainer of
    one process. Ranks never wait in a device collective."""

    name = "trainer"
    """The rank's name in messages and traces."""
    replica_group = 0
    """Number of the replica group that the rank belongs to. A replica group is the set of ranks that take windows
    together."""
    replica_groups = 1
    leader = True
    """Whether this rank talks to the orchestrator for its replica group."""
    exports = True
    """Whether this rank takes part in an export of the weights. All other ranks hold copies."""
    writes = True
    """Whether this rank sends its pipeline stage's tensors."""
    stage = 0
    """Number of the rank's pipeline stage."""

    def from_leader(self, act: Callable[[], M]) -> M:
        """Return the leader's result of `act` on every rank of its replica group, or raise its MetronomeError on all of
        them."""
        return act()

    def from_leader_beside(self, act: Callable[[], M]) -> M:
        """Like `from_leader`, but called from a second thread; one thread makes all other calls."""
        return act()

    def from_first(self, act: Callable[[], M]) -> M:
        """Return rank 0's result of `act` on every rank, or raise its MetronomeError on all of them."""
        return act()

    def gather(self, message: S) -> list[S]:
        """Return every rank's message, in rank order, on every rank. All messages have one type."""
        return [message]


class HostRanks(Ranks):
    """The ranks of torch.distributed's default group as data-parallel replicas. Each rank is one replica group, and
    rank 0 sends the weights. They communicate over gloo on the host. All ranks must construct it together.

    `engine.trainer.ranks.rank_group` adds Megatron's layouts.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        """`timeout_s`: seconds without a message on the channel after which a rank fails."""
        self.rank = dist.get_rank()
        self.name = f"trainer-{self.rank}"
        self.world = dist.get_world_size()
        self.replica_group = self.rank
        self.replica_groups = self.world
        self.exports = self.rank == 0
        self.writes = self.rank == 0
        self._wait = timedelta(seconds=timeout_s)
        self._everyone = dist.new_group(backend="gloo", timeout=self._wait) if self.world > 1 else None
        self._leaders: list[int] = list(range(self.world)) if self.world > 1 else []
        """Ranks of the leaders, by replica group; empty with a single rank."""
        self._replica_group: dist.ProcessGroup | None = None
        """The group of this rank's replica group; None if the rank is alone in it."""
        self._beside: dist.ProcessGroup | None = None
        """The same ranks, for a second thread: calls of one group must have the same order on all ranks."""

    def from_leader(self, act: Callable[[], M]) -> M:
        """Return the leader's result of `act` on every rank of its replica group, or raise its MetronomeError on all of
        them."""
        return self._from_leader(act, self._replica_group)

    def from_leader_beside(self, act: Callable[[], M]) -> M:
        """Like `from_leader`, but called from a second thread; one thread makes all other calls."""
        return self._from_leader(act, self._beside)

    def _from_leader(self, act: Callable[[], M], group: dist.ProcessGroup | None) -> M:
        leader = self._leaders[self.replica_group] if group is not None else None
        return self._act_and_broadcast(act, self.leader, leader, group)

    def from_first(self, act: Callable[[], M]) -> M:
        """Return rank 0's result of `act` on every rank, or raise its MetronomeError on all of them."""
        return self._act_and_broadcast(act, self.rank == 0, 0, self._everyone)

    def _act_and_broadcast(
        self, act: Callable[[], M], speaks: bool, source: int | None, group: dist.ProcessGroup | None
    ) -> M:
        if group is None:
            return act()
        data = b""
        failure: MetronomeError | None = None
        if speaks:
            try:
                data = pack(act())
            except MetronomeError as error:
                failure = error
                data = pack(Failure.of(error))
        message = read_message(_broadcast(data, source, group))
        if failure is not None:
            raise failure
        if isinstance(message, Failure):
            raise message.error()
        return cast(M, message)

    def gather(self, message: S) -> list[S]:
        """Return every rank's message, in rank order, on every rank. All messages have one type."""
        if self._everyone is None:
            return [message]
        data = pack(message)
        sizes = torch.empty(self.world, dtype=torch.long)
        dist.all_gather_into_tensor(sizes, torch.tensor([len(data)]), group=self._everyone)
        longest = int(sizes.max())
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        rows = torch.empty(self.world * longest, dtype=torch.uint8)
        dist.all_gather_into_tensor(rows, padded, group=self._everyone)
        found = zip(rows.view(self.world, longest), sizes, strict=True)
        decoder = msgspec.msgpack.Decoder(type(message))
        return [decoder.decode(row[: int(size)].numpy().tobytes()) for row, size in found]

    def worst(self, value: float, everyone: bool = False) -> float:
        """Return the largest value in the replica group, or over all ranks. NaN counts as infinite, so that it can't go
        unnoticed."""
        group = self._everyone if everyone else self._replica_group
        mine = torch.tensor([math.inf if math.isnan(value) else value], dtype=torch.float64)
        if group is None:
            return float(mine)
        found = mine.new_empty(group.size())
        # gathered instead of reduced: MindSpeed drops the result of an all_reduce of float64
        dist.all_gather_into_tensor(found, mine, group=group)
        return float(found.max())

    def barrier(self) -> None:
        """Wait on the host until every rank has called this."""
        self.worst(0.0, everyone=True)


def _broadcast(data: bytes, source: int | None, group: dist.ProcessGroup) -> bytes:
    """Return the source's bytes on every rank of the group."""
    size = torch.tensor([len(data)])
    dist.broadcast(size, source, group=group)
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, source, group=group)
    return buffer.numpy().tobytes()
