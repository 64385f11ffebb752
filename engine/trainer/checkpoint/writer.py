"""Writes Megatron's `torch_dist` format in the background: a copy is taken at once, a thread of each rank writes it.

Megatron's own asynchronous save forks the trainer, keeps a manager process per rank that outlives a `kill -9` of it,
and finishes with collectives. Here a thread writes, and each rank says by a file that it is done, so no collective runs
beside those of training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from engine.errors import DeadlineError, MetronomeError
from engine.run.files import write_json

BACKEND = ("torch_dist", 1)
LOOK_S = 0.02
"""Seconds between rank 0's looks for the other ranks' files."""


def snapshot(state: Mapping[str, object], folder: Path) -> Snapshot:
    """Copy this rank's part of a sharded state to the host, and plan which rank writes which tensors.

    A tensor that several replicas hold is written by one of them. A collective of all ranks. Raises MetronomeError if
    planning fails.
    """
    strategy = _Planning()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    shared = FullyParallelSaveStrategyWrapper(strategy, group) if group.size() > 1 else strategy
    try:
        dist_checkpointing.save(state, str(folder), shared, async_sharded_save=True)
    except CheckpointException as error:
        raise MetronomeError(f"checkpoint {folder}: it could not be planned: {error}") from error
    assert strategy.snapshot is not None
    return strategy.snapshot


class _Planning(TorchDistSaveShardedStrategy):
    """Megatron's strategy up to the point where files would be written."""

    def __init__(self) -> None:
        super().__init__(*BACKEND)
        self.snapshot: Snapshot | None = None

    def async_save(self, sharded_state_dict: dict[str, object], checkpoint_dir: str) -> AsyncRequest:
        """Plan the save and keep the copy in `snapshot`. Return an empty request."""
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self.snapshot = Snapshot(checkpoint_dir)
        planned, *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(tensors), self.snapshot, None, 0, planner=planner
        )
        self.snapshot.index = planned[1]
        return AsyncRequest(None, (), [])


class Snapshot(FileSystemWriter):
    """This rank's tensors on the host, with the plan to write them."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # nothing is left to copy
        self.rank_in_world = torch.distributed.get_rank()
        self.world = torch.distributed.get_world_size()
        self.index: Metadata | None = None
        """The index of all ranks' tensors, on rank 0."""
        self._plan: SavePlan | None = None
        self._tensors: dict[MetadataIndex, torch.Tensor] = {}

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copy the tensors, so that training can go on. Megatron calls this once the plan is made."""
        self._plan = plan
        self._tensors = {item.index: _host_copy(planner.resolve_data(item)) for item in plan.items}

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        """Return the copy of a tensor. torch's writer calls this as it would a planner's."""
        return self._tensors[item.index]

    def write(self) -> None:
        """Write this rank's file, then the list of its tensors' places, which says that the rank is done."""
        assert self._plan is not None, "the copy is taken before it is written"
        # of a planner, torch's writer calls `resolve_data` alone
        results = self.write_data(self._plan, self).wait() if self._plan.items else []  # type: ignore[arg-type]
        self._tensors.clear()
        write_json(_list_file(Path(self.path), self.rank_in_world), [_json_row(result) for result in results])

    def gather(self, timeout_s: float) -> None:
        """Wait for the lists of all ranks, then write the index. On rank 0.

        Raises DeadlineError that names the ranks without a list.
        """
        folder = Path(self.path)
        lists = [_list_file(folder, rank) for rank in range(self.world)]
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank, path in enumerate(lists) if not path.exists()]:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"trainer ranks {missing} have not written their part of {folder} within {timeout_s:.0f} s"
                )
            time.sleep(LOOK_S)
        assert self.index is not None
        self.finish(self.index, [[_from_json_row(row) for row in json.loads(path.read_text())] for path in lists])
        save_config(CheckpointingConfig(*BACKEND), str(folder))
        for path in lists:
            path.unlink()


def _host_copy(data: torch.Tensor | BytesIO) -> torch.Tensor:
    assert isinstance(data, torch.Tensor), "Megatron plans tensors alone"
    return data.detach().to("cpu", copy=True).contiguous()


def _list_file(folder: Path, rank: int) -> Path:
    return folder / f"written-{rank:05d}.json"


def _json_row(result: WriteResult) -> list[Any]:
    index = result.index
    assert index.offset is not None, "a part of a tensor has a place in it"
    where = result.storage_data
    return [
        index.fqn,
        list(index.offset),
        index.index,
        result.size_in_bytes,
        where.relative_path,
        where.offset,
        where.length,
    ]


def _from_json_row(row: Sequence[Any]) -> WriteResult:
    name, offset, hint, size, path, start, length = row
    return WriteResult(MetadataIndex(name, offset, hint), size, _StorageInfo(path, start, length))
