"""Checkpoints that hold everything a resume needs and never look complete when they are not (docs/architecture.md, A
checkpoint is everything).

A checkpoint is a folder in Megatron's `torch_dist` format (weights, old policy, moments and random streams: see
`engine.trainer.checkpoint.state`). It also holds `state.json` (step, config, layout, schedule, the reference by path
and hash). All ranks save it at once; any layout can load it. Each rank copies its tensors and continues training, while
a separate thread writes them. Rank 0's thread then writes the index, renames the folder, writes the marker last,
deletes old checkpoints and uploads the new one to `checkpoint.path`. All ranks must see the same run folder.

Megatron's asynchronous save is not used: it forks the trainer, keeps a manager process per rank that survives a
`kill -9` of the rank, and finishes with collectives. Here a thread writes, and each rank reports by a file that it is
done, so no collective runs concurrently with those of training.

Megatron's index is a pickle. It is read only if it is the file that the marker was written for and refers only to the
types that an index consists of (`checkpoint_files.check_checkpoint`). So a downloaded checkpoint can't run code.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
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

from engine.config import Config
from engine.errors import CheckpointError, DeadlineError, MetronomeError, TakenOver
from engine.evaluation.tables import awaited_versions, scores_by_version
from engine.run import checkpoint_store as store
from engine.run.checkpoint_files import (
    STATE,
    folder_of,
    is_complete,
    partial_of,
    prune_checkpoints,
    publish_checkpoint,
)
from engine.run.checkpoint_store import newest_whole
from engine.run.files import write_json
from engine.run.folder import RunFolder
from engine.run.logs import log_line
from engine.run.process import in_thread
from engine.run.resume import check_continues
from engine.run.run_file import Fence, read_run
from engine.trainer.checkpoint.state import load_state, present_layout, state_to_save, updates_of
from engine.trainer.policy import Policy
from engine.wire.messages import CheckpointDue, CheckpointFound

BACKEND = ("torch_dist", 1)
LOOK_S = 0.02
"""Seconds between rank 0's checks for the other ranks' files."""


def take_snapshot(state: Mapping[str, object], folder: Path) -> Snapshot:
    """Copy this rank's part of a sharded state to the host, and plan which rank writes which tensors.

    If several replicas hold a tensor, one of them writes it. Collective over all ranks. Raises MetronomeError if
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
    """Megatron's save strategy, stopped before any file is written."""

    def __init__(self) -> None:
        super().__init__(*BACKEND)
        self.snapshot: Snapshot | None = None

    def async_save(self, sharded_state_dict: dict[str, object], checkpoint_dir: str) -> AsyncRequest:
        """Plan the save and keep the plan and the copied tensors in `snapshot`. Return an empty request."""
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self.snapshot = Snapshot(checkpoint_dir)
        planned, *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(tensors), self.snapshot, None, 0, planner=planner
        )
        self.snapshot.index = planned[1]
        return AsyncRequest(None, (), [])


class Snapshot(FileSystemWriter):
    """This rank's tensors on the host, with the plan for writing them."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # nothing is left to copy
        self.rank_in_world = torch.distributed.get_rank()
        self.world = torch.distributed.get_world_size()
        self.index: Metadata | None = None
        """The index of all ranks' tensors; set on rank 0 only."""
        self._plan: SavePlan | None = None
        self._tensors: dict[MetadataIndex, torch.Tensor] = {}

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copy the tensors, so that training can continue. Megatron calls this once the plan is made."""
        self._plan = plan
        self._tensors = {item.index: _host_copy(planner.resolve_data(item)) for item in plan.items}

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        """Return the copy of a tensor. torch's writer calls this in place of the planner's method."""
        return self._tensors[item.index]

    def write(self) -> None:
        """Write this rank's file, then the list of its tensors' positions. The list signals that the rank is done."""
        assert self._plan is not None, "the copy is taken before it is written"
        # torch's writer calls no planner method but `resolve_data`
        results = self.write_data(self._plan, self).wait() if self._plan.items else []  # type: ignore[arg-type]
        self._tensors.clear()
        write_json(_list_file(Path(self.path), self.rank_in_world), [_json_row(result) for result in results])

    def gather(self, timeout_s: float) -> None:
        """Wait for the lists of all ranks, then write the index. Called on rank 0.

        Raises DeadlineError, which names the ranks without a list.
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


@dataclass(frozen=True)
class _PendingSave:
    """A save whose files are not all written."""

    name: str
    done: Future[None]


class Checkpoints:
    """The run's checkpoints, as one rank sees them. All ranks build it; `save` and `resume` are collectives over all
    ranks."""

    def __init__(self, root: Path, policy: Policy, config: Config, fence: Fence | None = None) -> None:
        """`root`: folder `checkpoints` of the run, whose inputs are recorded (engine.run.run_inputs); `fence`: the
        orchestrator's fence, which must permit each checkpoint; None means no fence."""
        self._fence = fence or Fence(root.parent, 0)
        self._root = root
        self._policy = policy
        self._config = config
        self._place = store.place_of(config)
        self._run = read_run(root.parent)
        self._pending: _PendingSave | None = None
        self._step: int | None = None
        """Step of the checkpoint saved or loaded last."""
        self.prompt_position: int | None = None
        """Number of prompts used before the next step, with algorithm.dynamic_sampling; else None, because the step
        determines it."""
        self.prompts: str | None = None
        """Fingerprint of the prompts in order (`PromptLoader.fingerprint`): first the checkpoint's, then the run's."""
        self.notices: tuple[str, ...] = ()
        """What the run's user should see of the checkpoints that `resume` looked at."""

    def save(self, step: int, figures: Mapping[str, object] | None = None) -> None:
        """Take the checkpoint before step `step`; return once the tensors are copied.

        Does nothing if this checkpoint was the last one saved or loaded and is complete. `figures`: figures of the last
        step. First waits for a save in progress and raises its error (see `finish`). Collective over all ranks.
        """
        self.finish(self._config.train.timeout_s)
        target = folder_of(self._root, step)
        ranks = self._policy.ranks
        due = ranks.from_first(lambda: CheckpointDue(self._prepare(step), updates_of(self._policy.optimizer)))
        self._step = step
        if not due.needed:
            return
        taken = take_snapshot(state_to_save(self._policy, due.updates), partial_of(target))
        numbers = {key: float(value) for key, value in (figures or {}).items() if isinstance(value, int | float)}
        state = self._state(step, due.updates)
        writing = in_thread("checkpoint", lambda: self._write(taken, target, state, numbers))
        self._pending = _PendingSave(target.name, writing)

    def poll(self) -> None:
        """Forget a finished save. Raises CheckpointError with its name if it failed, and TakenOver if another
        orchestrator writes the run. Not a collective."""
        if self._pending is None or not self._pending.done.done():
            return
        flight = self._pending
        self._pending = None
        error = flight.done.exception()
        if isinstance(error, TakenOver):
            raise error
        if error is not None:
            raise CheckpointError(
                f"checkpoint {flight.name} could not be saved: {type(error).__name__}: {error}"
            ) from error

    def finish(self, timeout_s: float) -> None:
        """Wait until this rank has written its part; on rank 0, until the checkpoint is complete and uploaded.

        Raises DeadlineError after `timeout_s` seconds, and CheckpointError as `poll` does. Not a collective.
        """
        if self._pending is not None and wait([self._pending.done], timeout_s).not_done:
            raise DeadlineError(
                f"waited {timeout_s:.0f} s for checkpoint {self._pending.name} to be written to {self._root}"
                + (f" and {self._place}" if self._place else "")
            )
        self.poll()

    def resume(self) -> int | None:
        """Load the newest whole checkpoint of the run folder, or else of `checkpoint.path`.

        Returns the step to continue with; None if there is no checkpoint. Prints which checkpoints are skipped and why,
        and what cannot be restored in another layout. Raises BadInput if the checkpoint has another model, other inputs
        or another fixed key, CheckpointError if all are damaged. Collective over all ranks.
        """
        found = self._policy.ranks.from_first(self._find_checkpoint)
        if found.name is None:
            return None
        folder = self._root / found.name
        state = json.loads((folder / STATE).read_text())
        check_continues(self._config, state, self._run.inputs, _as_json(asdict(self._policy.models.shape)))
        same_layout = state["layout"] == present_layout()
        try:
            load_state(
                folder=str(folder),
                policy=self._policy,
                updates=state["updates"],
                same_layout=same_layout,
                gradient_control=state["gradient_control"],
            )
        except CheckpointException as error:
            raise CheckpointError(f"checkpoint {folder} could not be read: {error}") from error
        self._policy.scheduler.load_state_dict(state["scheduler"])
        self._policy.scheduler.step(increment=0)
        self._step = int(state["step"])
        self.prompt_position = state["prompt_position"]
        self.prompts = state["prompts"]
        if not same_layout:
            self._print_on_rank_0(
                f"checkpoint {folder.name} was saved in the layout {state['layout']}, this run has {present_layout()}: "
                "the random streams of its ranks are not restored (sampling does not depend on them)"
            )
        return self._step

    def _prepare(self, step: int) -> bool:
        """Return whether the checkpoint must be written, and if so, make an empty folder for it. Raises TakenOver."""
        self._fence.check_attempt()
        target = folder_of(self._root, step)
        if step == self._step and is_complete(target):
            return False
        shutil.rmtree(partial_of(target), ignore_errors=True)
        partial_of(target).mkdir(parents=True)
        return True

    def _state(self, step: int, updates: int) -> dict[str, Any]:
        """Return the part of the current state that is not stored as tensors: the content of `state.json`."""
        return {
            "step": step,
            "weight_version": step,
            "updates": updates,
            "prompt_position": self.prompt_position,
            "prompts": self.prompts,
            "layout": present_layout(),
            "model": _as_json(asdict(self._policy.models.shape)),
            "inputs": self._run.inputs,
            "scheduler": self._policy.scheduler.state_dict(),
            "gradient_control": self._policy.control.state() if self._policy.control else {},
            "config": self._config.model_dump(mode="json"),
            "torch": torch.__version__,
        }

    def _write(self, taken: Snapshot, target: Path, state: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """Write this rank's part; on rank 0, then complete the checkpoint. Runs in the background."""
        taken.write()
        if taken.rank_in_world:
            return
        taken.gather(self._config.train.timeout_s)
        write_json(partial_of(target) / STATE, state)
        publish_checkpoint(
            partial=partial_of(target),
            target=target,
            step=int(state["step"]),
            figures=figures,
            run=self._run.id,
            began=self._run.began,
            fence=self._fence.check_attempt,
        )
        keep = self._config.checkpoint
        scores = self._scores(int(state["step"])) if keep.keep_best else {}
        self._fence.check_attempt()
        prune_checkpoints(self._root, keep.keep_last, keep.keep_best, scores)
        if self._place:
            store.upload_checkpoint(target, f"{self._place}/{target.name}", fence=self._fence.check_attempt)
            try:
                store.prune_published(
                    place=self._place, last=keep.keep_last, best=keep.keep_best, scores=scores, run=self._run.id
                )
            except CheckpointError as error:  # old checkpoints remain and take space; the next save deletes them
                self._print_on_rank_0(f"warning: {error}")

    def _scores(self, step: int) -> dict[int, float | None]:
        """Return what the run's evaluations say of its versions, up to the one of step `step`; None: it is awaited."""
        folder = RunFolder(self._root.parent)
        return {**dict.fromkeys(awaited_versions(folder, self._config, step)), **scores_by_version(folder)}

    def _find_checkpoint(self) -> CheckpointFound:
        """Return the checkpoint to load, verified and in the run folder. Called on rank 0."""
        folder = newest_whole(self._root, self._place, self._run.id, self._tell)
        return CheckpointFound(None if folder is None else folder.name)

    def _tell(self, message: str) -> None:
        log_line(message)
        self.notices = (*self.notices, message)

    def _print_on_rank_0(self, message: str) -> None:
        if self._policy.ranks.rank == 0:
            log_line(message)


def _as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content as JSON would give it back: tuples become lists."""
    return dict(json.loads(json.dumps(content)))
