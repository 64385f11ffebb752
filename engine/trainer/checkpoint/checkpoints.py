"""Checkpoints that are everything (docs/architecture.md) and never look complete when they are not.

A checkpoint is a folder in Megatron's `torch_dist` format (weights, old policy, moments and random streams: see
`engine.trainer.checkpoint.state`) with `state.json` beside it (step, config, layout, schedule, the reference by path
and hash). It is saved by all ranks at once and loaded by any layout. Each rank takes a copy of its tensors and goes on;
a thread of its own writes them. Rank 0's thread makes the whole of it: index, rename, marker last, old ones deleted,
the new one published to `checkpoint.path`. All ranks must see the same run folder.

Megatron's index is a pickle. It is read only if it is the file that the marker was written for and refers to nothing
but what an index consists of (`checkpoint_files.check`), so a checkpoint from a bucket can't run code.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException

from engine.config import Config
from engine.errors import BadInput, CheckpointError, DeadlineError
from engine.run import checkpoint_store as store
from engine.run.checkpoint_files import (
    check,
    complete,
    folder_of,
    incomplete,
    latest,
    partial_of,
    prune,
    publish,
    step_of,
    write_json,
)
from engine.run.folder import check_same_keys
from engine.run.identity import identity
from engine.trainer.checkpoint.state import layout, load_state, state_to_save, updates_of
from engine.trainer.checkpoint.writer import Snapshot, snapshot
from engine.trainer.policy import Policy
from engine.wire.messages import CheckpointDue, CheckpointFound

__all__ = ["Checkpoints", "complete", "folder_of", "incomplete", "latest", "step_of"]

STATE = "state.json"


@dataclass(frozen=True)
class _PendingSave:
    """A save whose files are not all written yet."""

    name: str
    done: Future[None]


class Checkpoints:
    """The run's checkpoints, as one rank sees them. Built by every rank; `save` and `resume` are collectives of all."""

    def __init__(self, root: Path, policy: Policy, config: Config, reference_hash: str | None) -> None:
        """`root`: folder `checkpoints` of the run folder; `reference_hash`:
        content of the reference model, None without one."""
        self._root = root
        self._policy = policy
        self._config = config
        self._reference = {"path": config.model.path, "hash": reference_hash} if reference_hash else None
        self._place = store.place_of(config)
        self._run = identity(root.parent)
        self._flight: _PendingSave | None = None
        self._step: int | None = None
        """Of the checkpoint that was saved or loaded last."""
        self.prompt_position: int | None = None
        """Prompts used before the next step, with algorithm.dynamic_sampling; else they are a function of the step."""
        self.prompts: str | None = None
        """Fingerprint of the prompts in their order (`PromptLoader.fingerprint`):
        of the loaded checkpoint, or of the run."""

    def save(self, step: int, figures: Mapping[str, object] | None = None) -> None:
        """Take the checkpoint before step `step`; returns once the copy is taken. Nothing if it was the last one
        already.

        `figures` are the numbers of the last step; the best checkpoints are chosen by its reward_mean. Waits for the
        save before, if that is still under way, and raises what it failed with. A collective of all ranks.
        """
        self.finish(self._config.train.timeout_s)
        target = folder_of(self._root, step)
        ranks = self._policy.ranks
        due = ranks.from_first(lambda: CheckpointDue(self._prepare(step), updates_of(self._policy.optimizer)))
        self._step = step
        if not due.needed:
            return
        taken = snapshot(state_to_save(self._policy, due.updates), partial_of(target))
        numbers = {key: float(value) for key, value in (figures or {}).items() if isinstance(value, int | float)}
        state = self._state(step, due.updates)
        self._flight = _PendingSave(target.name, _in_background(lambda: self._write(taken, target, state, numbers)))

    def poll(self) -> None:
        """Forget a save that is through. Raises CheckpointError, naming it, if it failed. No collective."""
        if self._flight is None or not self._flight.done.done():
            return
        flight = self._flight
        self._flight = None
        error = flight.done.exception()
        if error is not None:
            raise CheckpointError(
                f"checkpoint {flight.name} could not be saved: {type(error).__name__}: {error}"
            ) from error

    def finish(self, timeout_s: float) -> None:
        """Wait until this rank has nothing left to write; rank 0 waits for all and for what is published.

        Raises DeadlineError after `timeout_s` seconds, and like `poll`. No collective.
        """
        if self._flight is not None and wait([self._flight.done], timeout_s).not_done:
            raise DeadlineError(
                f"waited {timeout_s:.0f} s for checkpoint {self._flight.name} to be written to {self._root}"
                + (f" and {self._place}" if self._place else "")
            )
        self.poll()

    def resume(self) -> int | None:
        """Load the newest complete checkpoint, of the run folder or else of `checkpoint.path`; the step to go on with.

        None if there is none. Prints what is ignored and why, and what another layout can't take over. Raises BadInput
        if the checkpoint is of another model or reference. A collective of all ranks.
        """
        found = self._policy.ranks.from_first(self._find)
        if found.name is None:
            return None
        folder = self._root / found.name
        state = json.loads((folder / STATE).read_text())
        self._check_layout(folder, state)
        same_layout = state["layout"] == layout()
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
        self.prompt_position = state.get("prompt_position")
        self.prompts = state.get("prompts")
        if not same_layout:
            self._warn(
                f"checkpoint {folder.name} was saved in the layout {state['layout']}, this run has {layout()}: "
                "the random streams of its ranks are not restored (sampling does not depend on them)"
            )
        return self._step

    def _prepare(self, step: int) -> bool:
        """Whether it is to be written; then there is an empty folder for it."""
        target = folder_of(self._root, step)
        if step == self._step and complete(target):
            return False
        shutil.rmtree(partial_of(target), ignore_errors=True)
        partial_of(target).mkdir(parents=True)
        return True

    def _state(self, step: int, updates: int) -> dict[str, Any]:
        """What is not in tensors, as of now."""
        return {
            "step": step,
            "weight_version": step,
            "updates": updates,
            "prompt_position": self.prompt_position,
            "prompts": self.prompts,
            "layout": layout(),
            "model": _plain(asdict(self._policy.models.shape)),
            "reference": self._reference,
            "scheduler": self._policy.scheduler.state_dict(),
            "gradient_control": self._policy.control.state() if self._policy.control else {},
            "config": self._config.model_dump(mode="json"),
            "torch": torch.__version__,
        }

    def _write(self, taken: Snapshot, target: Path, state: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """In the background: this rank's part; on rank 0 then the whole."""
        taken.write()
        if taken.rank_in_world:
            return
        taken.gather(self._config.train.timeout_s)
        write_json(partial_of(target) / STATE, state)
        publish(partial=partial_of(target), target=target, step=int(state["step"]), figures=figures, run=self._run)
        keep = self._config.checkpoint
        prune(self._root, keep.keep_last, keep.keep_best)
        if self._place:
            store.upload(target, f"{self._place}/{target.name}")
            try:
                store.prune(self._place, keep.keep_last, keep.keep_best, self._run)
            except CheckpointError as error:  # costs space, no checkpoint: the next save deletes them
                self._warn(f"warning: {error}")

    def _find(self) -> CheckpointFound:
        """On rank 0: the checkpoint to load, in the run folder and checked."""
        for message in incomplete(self._root).values():
            self._warn(message)
        folder = latest(self._root)
        if folder is None and self._place:
            folder = self._fetch()
        if folder is None:
            return CheckpointFound(None)
        check(folder)
        return CheckpointFound(folder.name)

    def _fetch(self) -> Path | None:
        found, ignored = store.survey(self._place, self._run)
        for message in ignored:
            self._warn(message)
        if not found:
            return None
        name = max(found, key=lambda name: found[name]["step"])
        self._warn(f"checkpoint {name} comes from {self._place}")
        return store.download(self._place, name, found[name], self._root)

    def _check_layout(self, folder: Path, state: Mapping[str, Any]) -> None:
        if (state["reference"] or {}).get("hash") != (self._reference or {}).get("hash"):
            raise BadInput(
                f"checkpoint {folder}: it was taken with another reference model (content hash differs); "
                "resume with the model.path that the run started from"
            )
        ours = _plain(asdict(self._policy.models.shape))
        if differs := sorted(key for key in ours if ours[key] != state["model"].get(key)):
            raise BadInput(
                f"checkpoint {folder}: it is of another model than model.path = {self._config.model.path!r} "
                f"({', '.join(differs)} differ)"
            )
        check_same_keys(self._config, state["config"])

    def _warn(self, message: str) -> None:
        if self._policy.ranks.rank == 0:
            print(message, flush=True)


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from JSON."""
    return dict(json.loads(json.dumps(content)))


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Do it in a thread that the process does not wait for when it ends."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except Exception as error:  # whatever it is, it is raised by the next call
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
