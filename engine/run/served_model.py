"""Finds what `metronome serve --model` serves: the policy of a run, or the model in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypedDict

from engine.config import Config
from engine.config.recipe import find_file, load_config
from engine.errors import BadInput
from engine.model.shape import read_shape
from engine.run.checkpoint_files import all_complete, latest_checkpoint, step_of
from engine.run.files import read_json, read_lines
from engine.run.folder import CONFIG, RunFolder
from engine.run.lock import share_lock

ORIGIN = "checkpoint.json"
"""File in a folder that was exported from a checkpoint: its path, its id and its weight version."""
EXPORTED = "exported"
"""Folder in a run folder with the policies of its checkpoints, by their names."""
MODELS = "models"
"""Folder in `run.output` with the policies that were downloaded from the registry."""
REGISTERED = ".registered"
"""File in such a folder: the address of the policy, models:/NAME/VERSION. Other folders there are the user's."""
FETCH = ".fetch-"
"""Beginning of the names of folders there into which a policy is being downloaded."""
IN_USE = ".in-use"
"""End of the names of locks on models."""
CONTEXT = 4096
"""Largest number of tokens of prompt and response together, unless a recipe sets it. More would take memory that few
need."""


class ExportOrigin(TypedDict):
    """What this module reads of ORIGIN."""

    id: str
    weight_version: int


def served_config(model: str, recipe: str, overrides: Sequence[str]) -> tuple[Config, str]:
    """Return the config of the instance, and the model's name for its clients.

    `model`: a run folder, whose recipe is used, or a Hugging Face folder. `recipe` ("": none) and `overrides` take
    precedence. Raises BadInput if there is no model.
    """
    folder, run = model_folder(model)
    if run is not None:
        config = load_config(recipe or run.config, _with_room(overrides))
    else:
        config = load_config(recipe, _with_room(overrides)) if recipe else _of_model(folder, overrides)
    read_shape(folder)
    path = config.model.model_copy(update={"path": str(folder.resolve())})
    name = (folder if run is None else run.path).resolve().name
    exported = f"-{folder.name}" if run is not None and folder.parent.name == EXPORTED else ""
    return config.model_copy(update={"model": path}), name + exported


def model_folder(model: str) -> tuple[Path, RunFolder | None]:
    """Return the Hugging Face folder that `--model` means, and the run to which this policy belongs, if any.

    `model`: a run folder, or a Hugging Face folder. Raises BadInput for anything else.
    """
    place = find_file(model)
    run = RunFolder(_run_of(place))
    if run.config.is_file() and run.path == place:
        if not run.policy.is_dir():
            there = [folder.name for folder in all_complete(run.checkpoints)]
            checkpoints = f", or one of its checkpoints, {run.checkpoints}/{there[-1]}" if there else ""
            raise BadInput(
                f"--model {model}: this run has no policy yet ({run.policy}); it is written after the last step. "
                f"Give a finished run{checkpoints}, or a Hugging Face folder"
            )
        return run.policy, run
    if not (place / "config.json").is_file():
        found = "it has no config.json" if place.is_dir() else f"there is no folder {place.absolute()}"
        near = Path(Config().run.output) / model
        hint = f"; did you mean {near}?" if RunFolder(near).config.is_file() else ""
        raise BadInput(
            f"--model {model}: {found}{hint}; expected a run folder with a policy, a checkpoint of a run, or a Hugging "
            "Face folder, here or on s3://, or owner/name on the hub (where no folder `owner` is here)"
        )
    return place, run if run.config.is_file() else None


def in_use(model: Path) -> AbstractContextManager[None]:
    """Hold a model's folder during the body, shared with others, so that `metronome prune` leaves it. Models that are
    neither a run's nor a download are not held: nothing deletes them."""
    model = model.resolve()
    ours = (model.parent / CONFIG).is_file() or model.parent.name in (EXPORTED, MODELS)
    return share_lock(use_lock(model), f"model {model}") if ours else nullcontext()


def use_lock(model: Path) -> Path:
    """The file that `in_use` locks, beside the model's folder."""
    return model.with_name(f".{model.name}{IN_USE}")


def _run_of(place: Path) -> Path:
    """The folder of the run whose policy, or exported checkpoint, a folder is; else the folder itself."""
    folder = place.resolve()
    if folder.name == "policy":
        return place.parent
    return folder.parent.parent if folder.parent.name == EXPORTED else place


def weight_version(model: Path) -> int:
    """The weight version of a model folder: the number of updates if it is the policy of a run or was exported from a
    checkpoint, otherwise 0."""
    if (model / ORIGIN).is_file():
        repair = "export it again"
        origin = read_json(model / ORIGIN, "the checkpoint that it comes from", repair, kind=ExportOrigin)
        return int(origin["weight_version"])
    if model.name != "policy":
        return 0
    folder = RunFolder(model.parent)
    checkpoint = latest_checkpoint(folder.checkpoints)  # needed if the run folder was lost, and steps.jsonl with it
    return max(
        [step_of(checkpoint) if checkpoint is not None else 0, *(row["step"] + 1 for row in read_lines(folder.steps))]
    )


def _with_room(overrides: Sequence[str]) -> list[str]:
    """The overrides. If they set `rollout.max_context`, the smallest `rollout.max_new_tokens` is put before them, so
    that any context is large enough. An instance does not read this key, because each request gives the length of its
    response."""
    sets_context = any(one.partition("=")[0].strip() == "rollout.max_context" for one in overrides)
    return [*(["rollout.max_new_tokens=1"] if sets_context else []), *overrides]


def _of_model(folder: Path, overrides: Sequence[str]) -> Config:
    """The defaults, with the context length of the model, up to CONTEXT."""
    context = min(CONTEXT, read_shape(folder).context)
    return load_config(None, _with_room([f"rollout.max_context={context}", *overrides]))
