"""Exports checkpoints as Hugging Face folders: for `metronome export`, and where `--model` names a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from engine.config import Config
from engine.config.recipe import find_file, override_keys
from engine.errors import BadInput
from engine.evaluation.tables import scores_by_version
from engine.run.checkpoint_files import (
    MARKER,
    all_complete,
    fault_of,
    rank_checkpoints,
    read_marker,
    step_of,
)
from engine.run.commands import export_command
from engine.run.files import read_json
from engine.run.folder import RunFolder
from engine.run.lock import hold_lock
from engine.run.process import Child, run_to_end
from engine.run.served_model import EXPORTED, ORIGIN, ExportOrigin
from tasks.stages.input_checks import local_model
from tasks.terminal.console import say
from tasks.terminal.progress_display import show_progress, since_now

BEST = "best"
"""RUN/checkpoints/best means the checkpoint of the run with the best evaluation."""
WAIT_S = 3600.0
"""Longest time of an export in seconds, and of the wait for another one of the run, as of an instance that serves the
same checkpoint."""


def policy_folder(model: str, overrides: Sequence[str] = ()) -> str:
    """The folder that `--model` means. A checkpoint is exported first; otherwise as `local_model`, with the run.output
    of the overrides."""
    checkpoint = find_checkpoint(model)
    if checkpoint is not None:
        return str(export(checkpoint))
    return local_model(model, str(override_keys(overrides).get("run.output", Config().run.output)))


def find_checkpoint(path: str) -> Path | None:
    """The checkpoint that a path means: its folder, or RUN/checkpoints/best. None for another path. Raises BadInput if
    it is not complete or not there."""
    place = find_file(path)
    run = RunFolder(place.parent.parent)
    of_run = place.parent.name == run.checkpoints.name and run.config.is_file()
    if of_run and place.name == BEST:
        return best_checkpoint(run)
    if not of_run and not (place / MARKER).is_file():
        return None
    if (fault := fault_of(place)) is None:
        return place
    raise BadInput(f"{path}: {fault if place.is_dir() else 'there is no such checkpoint'}; {_there(run)}")


def best_checkpoint(run: RunFolder) -> Path:
    """The run's checkpoint with the best evaluation. Raises BadInput if none is evaluated."""
    steps = {folder.name: step_of(folder) for folder in all_complete(run.checkpoints)}
    ranked = rank_checkpoints(steps, scores_by_version(run))
    if not ranked:
        raise BadInput(
            f"{run.path}: no evaluation during the run (evaluate.every) says which of its checkpoints is the best; "
            f"{_there(run)}"
        )
    return run.checkpoints / ranked[0]


def _there(run: RunFolder) -> str:
    there = [folder.name for folder in all_complete(run.checkpoints)]
    return f"complete ones in {run.checkpoints}: {', '.join(there) or 'none'}"


def export(checkpoint: Path, out: Path | None = None) -> Path:
    """Write the policy of a complete checkpoint to a Hugging Face folder, by default in its run folder, and return the
    folder. One that was exported from this very checkpoint before is returned as it is.

    Raises BadInput if something else is there, if the base model is gone, or without `out` outside a run folder.
    """
    run = RunFolder(checkpoint.parent.parent)
    if out is None and not run.config.is_file():
        raise BadInput(f"{checkpoint} is in no run folder; say where to write by --out FOLDER")
    target = out or run.path / EXPORTED / checkpoint.name
    if is_exported(checkpoint, target):
        return target
    if target.exists() and out is not None:
        raise BadInput(f"--out {out}: it exists already; give another folder, or delete it")
    target.parent.mkdir(parents=True, exist_ok=True)
    what = f"the folder {target.parent} of exported checkpoints"
    lock = hold_lock(target.parent / ".lock", what, WAIT_S, lambda text: say("export", text))
    with lock if out is None else nullcontext():
        if not is_exported(checkpoint, target):
            _export(checkpoint, target)
    return target


def is_exported(checkpoint: Path, target: Path) -> bool:
    """Whether a folder has the policy of this very checkpoint."""
    origin = target / ORIGIN
    marker = read_marker(checkpoint)
    if marker is None or not origin.is_file():
        return False
    found = read_json(origin, "the checkpoint that it comes from", "delete it", kind=ExportOrigin)
    return bool(found["id"] == marker["id"])


def _export(checkpoint: Path, target: Path) -> None:
    log = target.with_name(f".{target.name}.log")
    child = Child("export", export_command(checkpoint.resolve(), target.resolve()), log)
    try:
        with show_progress("export", since_now(f"{checkpoint}: loading its weights")):
            run_to_end(child, WAIT_S, f"{checkpoint}: its export is not done after {WAIT_S:.0f} s")
    finally:
        shutil.rmtree(target.with_name(f".{target.name}.partial"), ignore_errors=True)  # as large as the model
    log.unlink()
    say("export", f"{checkpoint} to {target}")
