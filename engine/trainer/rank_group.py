"""A rank's place in the parallel layout, and the CPU channel between ranks, on which they wait for each other
(docs/architecture.md, Processes).

A *unit* is the ranks that take windows together: the tensor, pipeline and context ranks of a replica. Where experts are
split over several replicas, the unit is all of these, since the experts' all-to-all needs each of them in every
micro-batch. The unit's *leader* talks to the launcher and passes the replies on. The channel is gloo on the host on
every platform, so waiting for a long response never runs into the time limit of a device collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state as state

from engine.errors import MetronomeError
from engine.wire.messages import Failure, Message, pack, read_message

M = TypeVar("M", bound=Message)
S = TypeVar("S", bound=msgspec.Struct)


class RankGroup:
    """This rank's place and its collectives on the host. Built by all ranks at once, once Megatron's state is there."""

    def __init__(self, lockstep: int = 1, timeout_s: float = 600.0) -> None:
        """`lockstep`: number of data-parallel replicas that take each window of groups together (see "unit" above).
        `timeout_s`: seconds without a message on the CPU channel (gloo) after which a rank fails."""
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        data = state.get_data_parallel_rank()
        self.lockstep = lockstep
        self.share = data % lockstep
        """Number of this rank's replica in the unit."""
        self.unit = data // lockstep
        self.units = state.get_data_parallel_world_size() // lockstep
        first = state.get_tensor_model_parallel_rank() == 0 and state.get_context_parallel_rank() == 0
        self.leader = first and self.share == 0 and state.is_pipeline_first_stage()
        self.feeds = state.get_tensor_model_parallel_rank() == 0 and state.is_pipeline_first_stage()
        """Whether this rank counts the computed tokens of its replica (its own part under context parallelism)."""
        self.judges = state.get_tensor_model_parallel_rank() == 0 and state.is_pipeline_last_stage()
        """Whether this rank reports the losses of its replica (its own part under context parallelism)."""
        self.writes = first and data == 0
        """Whether this rank writes its pipeline stage's weights."""
        sharing = max(1, state.get_expert_model_parallel_world_size() // state.get_tensor_model_parallel_world_size())
        self.exports = state.get_data_parallel_rank(with_context_parallel=True) < sharing
        """Whether this rank takes part in an export of the weights: all other ranks hold copies."""
        self.stage = state.get_pipeline_model_parallel_rank()
        wait = timedelta(seconds=timeout_s)
        self._everyone = dist.new_group(backend="gloo", timeout=wait) if self.world > 1 else None
        self._leaders: list[int] = []
        """Ranks of the leaders, by unit; empty with a single rank."""
        self._unit = self._unit_group(wait)

    def _unit_group(self, wait: timedelta) -> dist.ProcessGroup | None:
        """Return the group of this rank's unit, None with a single rank. torch wants every rank to make every group."""
        if self.world == 1:
            return None
        units = torch.empty(self.world, dtype=torch.long)
        dist.all_gather_into_tensor(units, torch.tensor([self.unit]), group=self._everyone)
        leaders = torch.empty(self.world, dtype=torch.bool)
        dist.all_gather_into_tensor(leaders, torch.tensor([self.leader]), group=self._everyone)
        self._leaders = [rank for rank in range(self.world) if leaders[rank]]
        groups = [[rank for rank in range(self.world) if units[rank] == unit] for unit in range(self.units)]
        made = [dist.new_group(members, backend="gloo", timeout=wait) for members in groups]
        return made[self.unit]

    @property
    def name(self) -> str:
        """The rank's name in messages and traces."""
        return f"trainer-{self.rank}"

    def from_leader(self, act: Callable[[], M]) -> M:
        """Return the leader's result of `act` on every rank of its unit, or raise its MetronomeError on all of them."""
        leader = self._leaders[self.unit] if self._unit is not None else None
        return self._act_and_broadcast(act, self.leader, leader, self._unit)

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
        """Return the largest value in the unit, or of all ranks. NaN counts as infinite, so that it can't hide."""
        group = self._everyone if everyone else self._unit
        mine = torch.tensor([math.inf if math.isnan(value) else value], dtype=torch.float64)
        if group is None:
            return float(mine)
        found = mine.new_empty(group.size())
        # gathered and not reduced: MindSpeed drops the result of an all_reduce of float64
        dist.all_gather_into_tensor(found, mine, group=group)
        return float(found.max())

    def barrier(self) -> None:
        """Wait on the host until every rank is here."""
        self.worst(0.0, everyone=True)


def _broadcast(data: bytes, source: int | None, group: dist.ProcessGroup) -> bytes:
    """Return the source's bytes on every rank of the group."""
    size = torch.tensor([len(data)])
    dist.broadcast(size, source, group=group)
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, source, group=group)
    return buffer.numpy().tobytes()
