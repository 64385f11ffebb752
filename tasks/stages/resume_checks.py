"""Checks that reject a resume before anything in the run is written: its folder, its MLflow run and the registry."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from engine.config import Config
from engine.data.loader import load_prompts
from engine.data.prepared import training_problems
from engine.data.prompts import encode_problems
from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput, counted
from engine.model.shape import read_shape
from engine.run import checkpoint_store
from engine.run.checkpoint_files import STATE, Marker, all_complete, parse_state, read_marker
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.run.identity import known_run, published_checkpoints
from engine.run.resume import ANEW, changed_keys, check_continues
from engine.run.run_file import read_run
from engine.run.run_inputs import find_inputs
from engine.types import JsonObject
from engine.wire import record
from tasks.stages.input_checks import with_model_folder
from tasks.terminal.console import say
from tasks.terminal.progress_display import show_progress, since_now
from tasks.tracking.tracked_run import check_known


def check_resume(config: Config) -> Config:
    """Check that a run can continue with this config. Return the config with `model.path` as a folder.

    Raises BadInput if a file of the run folder is damaged, if MLflow's store does not have the run's MLflow run, or if
    the newest checkpoint does not fit: it was taken with another model, other prompts or other fixed keys, it has more
    steps than `train.steps`, or it has exactly as many and a setting of the training changes.
    """
    folder = RunFolder(config.folder)
    _check_files(folder)
    check_known(config)
    state = _newest_state(config, folder)
    if state is None:  # the run starts again from step 0
        if folder.config.exists():
            check_continues(config, {"step": 0, "config": folder.read_config().model_dump(mode="json")})
        return config
    say(
        "resume",
        f"compares model and prompts with those of the checkpoint after {counted(state['step'], 'step')}",
    )
    config = with_model_folder(config)
    model = Path(config.model.path)
    with show_progress("resume", since_now("comparing model and prompts")):
        shape = json.loads(json.dumps(asdict(read_shape(model))))
        check_continues(config, state, find_inputs(config, model), shape)
        _check_prompts(config, state)
    if config.train.record:
        record.check_continued(folder.path / record.FILE, config, int(state["step"]))
    return config


def _check_files(folder: RunFolder) -> None:
    """Raise BadInput for the first damaged file among those that a resume reads."""
    read_run(folder.path)
    for lines in (folder.steps, folder.evaluations):
        for _ in read_lines(lines):
            pass


def _newest_state(config: Config, folder: RunFolder) -> JsonObject | None:
    """The state of the newest readable checkpoint in the run folder, or else in `checkpoint.path`; None if there is
    none. Reads no tensors."""
    for checkpoint in reversed(all_complete(folder.checkpoints)):
        if (found := _parsed((checkpoint / STATE).read_bytes(), read_marker(checkpoint))) is not None:
            return found
    there = published_checkpoints(config)
    number = read_run(folder.path).id
    own = {name: marker for name, marker in there.items() if not number or marker["run"] == number}
    for name in sorted(own, key=lambda name: own[name]["step"], reverse=True):
        text = checkpoint_store.read_published(checkpoint_store.place_of(config), name, STATE)
        if (found := _parsed(text, own[name])) is not None:
            return found
    return None


def _parsed(text: bytes, marker: Marker | None) -> JsonObject | None:
    """The state in a file, or None if it is damaged. (The trainer skips a damaged checkpoint and says so.)"""
    found = None if marker is None else parse_state(text, marker)
    return found if found is not None and found.keys() >= {"step", "config", "model", "inputs", "prompts"} else None


def _check_prompts(config: Config, state: JsonObject) -> None:
    if state["prompts"] is None:
        return
    tokenizer = Tokenizer(Path(config.model.path))
    began = known_run(config).began_at
    encoded = encode_problems(
        training_problems(config), tokenizer, config.data, config.rollout.max_context, clock=began
    )
    if load_prompts(encoded, config).fingerprint == state["prompts"] or "prompts" in config.run.accept:
        return
    changed = changed_keys(config, state["config"])
    raise BadInput(
        "--resume: the run would continue with other prompts, or with another order, other tokens or other columns of "
        "them, than its checkpoint was trained on. "
        + (f"Changed: {', '.join(changed)}. Leave out those that decide about prompts" if changed else _CONTENT)
        + f", {ANEW}, from this run's weights if model.path is its policy, or accept it with "
        "--set 'run.accept=[\"prompts\"]'"
    )


_CONTENT = (
    "Its keys are the same, so the content of data.train, data.heldout or a benchmark has changed, or the tokenizer of "
    "model.path or its chat template: put the files back"
)
