"""A rank's position in the parallel layout, and the CPU channel on which ranks wait for each other
(docs/architecture.md, Processes).

A *replica group* is the set of ranks that take windows together: the tensor, pipeline and context ranks of a replica.
If experts are split over several replicas, the replica group spans all of these, since the experts' all-to-all needs
each of them in every micro-batch. The replica group's *leader* talks to the orchestrator and passes the replies on. The
channel uses gloo on the host on every platform, so waiting for a long response never hits the time limit of a device
collective.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state as state

from engine.client.ranks import HostRanks, M


class RankGroup(HostRanks):
    """This rank's position and its host collectives. All ranks build it at once, after Megatron's parallel state is
    initialized."""

    def __init__(self, lockstep: int = 1, timeout_s: float = 600.0) -> None:
        """`lockstep`: number of data-parallel replicas that take each window of groups together (see "replica group"
        above). `timeout_s`: seconds without a message on the CPU channel (gloo) after which a rank fails."""
        super().__init__(timeout_s)
        data = state.get_data_parallel_rank()
        self.lockstep = lockstep
        self.share = data % lockstep
        """Index of this rank's replica in the replica group."""
        self.replica_group = data // lockstep
        self.replica_groups = state.get_data_parallel_world_size() // lockstep
        first = state.get_tensor_model_parallel_rank() == 0 and state.get_context_parallel_rank() == 0
        self.leader = first and self.share == 0 and state.is_pipeline_first_stage()
        self.feeds = state.get_tensor_model_parallel_rank() == 0 and state.is_pipeline_first_stage()
        """Whether this rank counts the computed tokens of its replica (its own part under context parallelism)."""
        self.judges = state.get_tensor_model_parallel_rank() == 0 and state.is_pipeline_last_stage()
        """Whether this rank reports the losses of its replica (its own part under context parallelism)."""
        self.speaks_last = self.judges and state.get_context_parallel_rank() == 0 and self.share == 0
        """Whether this rank speaks for the last pipeline stage of its replica group (`from_last`)."""
        self.writes = first and data == 0
        sharing = max(1, state.get_expert_model_parallel_world_size() // state.get_tensor_model_parallel_world_size())
        self.exports = state.get_data_parallel_rank(with_context_parallel=True) < sharing
        self.stage = state.get_pipeline_model_parallel_rank()
        self._last: dict[int, int] = {}
        """By replica group: the rank that speaks for the replica group's last pipeline stage; empty with a single
        rank."""
        if self.world > 1:
            replica_groups = self._groups_of_ranks()
            self._leaders = self._ranks_with(self.leader)
            self._last = {replica_groups[rank]: rank for rank in self._ranks_with(self.speaks_last)}
            members = [
                [rank for rank in range(self.world) if replica_groups[rank] == replica_group]
                for replica_group in range(self.replica_groups)
            ]
            # torch requires every rank to create every group
            self._replica_group, self._beside = (
                [dist.new_group(ranks, backend="gloo", timeout=self._wait) for ranks in members][self.replica_group]
                for _ in range(2)
            )

    def from_last(self, act: Callable[[], M]) -> M:
        """Call `act` on the replica group's last pipeline stage and return its result on every rank of the replica
        group, or raise its MetronomeError on all of them."""
        source = self._last[self.replica_group] if self._replica_group is not None else None
        return self._act_and_broadcast(act, self.speaks_last, source, self._replica_group)

    def _ranks_with(self, holds: bool) -> list[int]:
        """Return all ranks where `holds` is true. Collective over all ranks."""
        found = torch.empty(self.world, dtype=torch.bool)
        dist.all_gather_into_tensor(found, torch.tensor([holds]), group=self._everyone)
        return [rank for rank in range(self.world) if found[rank]]

    def _groups_of_ranks(self) -> list[int]:
        """Return the replica group of every rank. Collective over all ranks."""
        replica_groups = torch.empty(self.world, dtype=torch.long)
        dist.all_gather_into_tensor(replica_groups, torch.tensor([self.replica_group]), group=self._everyone)
        return [int(replica_group) for replica_group in replica_groups]
