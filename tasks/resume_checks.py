"""Checks that reject a resume before anything in the run is written: its folder, its MLflow run and the registry."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.data.loader import load_prompts
from engine.data.prepared import training_problems
from engine.data.prompts import encode_problems
from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput, counted
from engine.model.shape import read_shape
from engine.run import checkpoint_store
from engine.run.checkpoint_files import STATE, Marker, all_complete, parse_state, read_marker
from engine.run.fence import check_readable
from engine.run.files import read_lines
from engine.run.folder import OWN_CODE, RunFolder, check_same_keys
from engine.run.identity import known_number, published_checkpoints, read_run_id, run_began
from engine.run.run_inputs import check_inputs_kept, find_inputs, read_inputs
from engine.run.run_start import read_start
from engine.run.user_code import name_code
from engine.types import JsonObject
from engine.wire import record
from tasks.console import say
from tasks.finished_stages import Stages
from tasks.input_checks import with_model_folder
from tasks.progress_display import show_progress, since_now
from tasks.resume import differing_keys
from tasks.tracking.tracked_run import check_known

DECIDE_PROMPTS = (
    "model.path",
    "data.train",
    "data.decontaminate",
    "data.heldout",
    "evaluate.benchmark",
    "evaluate.folder",
    "reward.function",
    "reward.functions",
    "rollout.max_context",
)
"""Keys that a resumed run may change only if its prompts stay the same."""
TRAINED_WITH = (*record.PLAN, "train.mode")
"""Keys that determine how the steps were trained."""
ANEW = "start a new run with another run.name"


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
        return config
    say(
        "resume",
        f"compares model and prompts with those of the checkpoint after {counted(state['step'], 'step')}",
    )
    config = with_model_folder(config)
    check_same_keys(config, state["config"])
    start = int(state["step"])
    if start > config.train.steps:
        raise BadInput(
            f"--resume: the run has trained {counted(start, 'step')} already, train.steps is {config.train.steps}; "
            f"give train.steps = {start} or more"
        )
    with show_progress("resume", since_now("comparing model and prompts")):
        _check_model(config, state)
        _check_prompts(config, state)
    if config.train.record:
        record.check_continued(folder.path / record.FILE, config, start)
    if start == config.train.steps and folder.config.exists():
        _check_through(config, folder.read_config(), start)
    return config


def _check_through(config: Config, own: Config, steps: int) -> None:
    """Raise BadInput if all steps are trained and a setting of the training changes: config.toml would then describe
    settings with which no step was trained."""
    differs = [
        (key, now)
        for key, now, then in differing_keys(config, own, TRAINED_WITH)
        if key not in OWN_CODE or name_code(now) != name_code(then)
    ]
    if changed := [f"{key} = {now!r}" for key, now in differs]:
        raise BadInput(
            f"--resume: all {steps} steps are trained, so {', '.join(changed)} would have no effect; also give "
            f"train.steps to train further with it, or {ANEW}"
        )


def _check_files(folder: RunFolder) -> None:
    """Raise BadInput for the first damaged file among those that a resume reads."""
    read_run_id(folder.path)
    read_start(folder.path)
    read_inputs(folder.path)
    check_readable(folder.path)
    Stages(folder)
    for lines in (folder.attempts, folder.steps, folder.evaluations):
        for _ in read_lines(lines):
            pass


def _newest_state(config: Config, folder: RunFolder) -> JsonObject | None:
    """The state of the newest readable checkpoint in the run folder, or else in `checkpoint.path`; None if there is
    none. Reads no tensors."""
    for checkpoint in reversed(all_complete(folder.checkpoints)):
        if (found := _parsed((checkpoint / STATE).read_bytes(), read_marker(checkpoint))) is not None:
            return found
    there = published_checkpoints(config)
    number = read_run_id(folder.path)
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


def _check_model(config: Config, state: JsonObject) -> None:
    model = Path(config.model.path)
    shape = json.loads(json.dumps(asdict(read_shape(model))))
    before = state["model"]
    if differs := sorted(key for key in shape if shape[key] != before.get(key)):
        what = f"its sizes differ from those of the run's base model ({', '.join(differs)})"
        raise BadInput(
            f"--resume: model.path = {config.model.path!r}: {what}; give model.path = "
            f"{_value_of(state['config'], 'model.path')!r}, or a copy of it, or {ANEW} to train this model"
        )
    check_inputs_kept(config.folder, config, find_inputs(config, model), state["inputs"])


def _check_prompts(config: Config, state: JsonObject) -> None:
    if config.algorithm.dynamic_sampling and state["step"] and state.get("prompt_position") is None:
        raise BadInput(
            f"--resume: the checkpoint after {state['step']} steps does not say how many prompts were used, which "
            f"algorithm.dynamic_sampling needs (a replay wrote it); {ANEW}"
        )
    if state["prompts"] is None:
        if config.data.model_dump(mode="json")["train"] != (then := state["config"]["data"]["train"]):
            raise BadInput(
                f"--resume: data.train is {config.data.train!r}, but the run has {then!r}; its checkpoint does not say "
                f"what that held (a replay wrote it). Leave it out, or {ANEW}"
            )
        return
    tokenizer = Tokenizer(Path(config.model.path)).hf
    encoded = encode_problems(
        training_problems(config),
        tokenizer,
        config.data,
        config.rollout.max_context,
        clock=run_began(known_number(config)),
    )
    if load_prompts(encoded, config).fingerprint == state["prompts"] or "prompts" in config.run.accept:
        return
    changed = [key for key in DECIDE_PROMPTS if _value(config, key) != _value_of(state["config"], key)]
    raise BadInput(
        "--resume: the run would continue with other prompts, or with another order, other tokens or other columns of "
        "them, than its checkpoint was trained on. "
        + (f"Changed: {', '.join(changed)}. Leave them out" if changed else _CONTENT)
        + f", {ANEW}, from this run's weights if model.path is its policy, or accept it with "
        "--set 'run.accept=[\"prompts\"]'"
    )


_CONTENT = (
    "Its keys are the same, so the content of data.train, data.heldout or a benchmark has changed, or the tokenizer of "
    "model.path or its chat template: put the files back"
)


def _value(config: Config, key: str) -> Any:  # noqa: ANN401
    return _value_of(config.model_dump(mode="json"), key)


def _value_of(tables: JsonObject, key: str) -> Any:  # noqa: ANN401
    table, _, name = key.partition(".")
    return tables.get(table, {}).get(name)
