"""Whether a run can go on from a checkpoint: what differs, by the marks of the keys (engine.config.marks)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from engine.config import Config
from engine.config.keys import flatten_keys
from engine.config.marks import Mark, Rule, marked_keys, value_of
from engine.errors import BadInput, counted
from engine.run.folder import RunFolder
from engine.run.run_inputs import Inputs, describe_change
from engine.types import JsonObject

MARKS: Mapping[str, Mark] = {key: marks[-1] for key, marks in marked_keys(Config, Mark)}
"""The mark of each key that has one."""
ANEW = "start a new run with another run.name"


class KeyDifference(NamedTuple):
    """A reason why a run cannot continue."""

    key: str
    now: object
    then: object
    why: str
    """The reason, and what to do about it."""


def keys_of(*rules: Rule) -> list[str]:
    """The keys with a mark of these rules."""
    return [key for key, mark in MARKS.items() if mark.rule in rules]


def compared_value(tables: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401
    """What is compared of the value of a key. Raises KeyError if the tables do not have it."""
    return MARKS[key].compared(value_of(tables, key))


def differences(
    config: Config, state: Mapping[str, Any], inputs: Inputs | None = None, shape: JsonObject | None = None
) -> list[KeyDifference]:
    """What differs from a run's newest checkpoint so that the run cannot continue from it. Reads no file.

    `state`: what the checkpoint says of itself, or step 0 and config of a run that has none yet. `inputs` and `shape`:
    the present inputs and the sizes of the model at model.path; None: they are not compared.
    """
    step = int(state["step"])
    found = [*_changed_settings(config, state["config"], step)]
    if step > config.train.steps:
        why = f"the run has trained {counted(step, 'step')} already, train.steps is {config.train.steps}"
        found.append(
            KeyDifference("train.steps", config.train.steps, step, f"{why}; give train.steps = {step} or more")
        )
    if shape is not None:
        found += _other_model(config, state, shape)
    if inputs is not None and (why := describe_change(config, inputs, state["inputs"])):
        found.append(KeyDifference("run.accept", inputs, state["inputs"], why))
    return found + [*_unknown_prompts(config, state)]


def check_continues(
    config: Config, state: Mapping[str, Any], inputs: Inputs | None = None, shape: JsonObject | None = None
) -> None:
    """Raise BadInput, which says all `differences`, unless the run can continue from this checkpoint."""
    if found := differences(config, state, inputs, shape):
        policy = RunFolder(config.folder).policy
        start = f" (it can start from this run's policy: --set model.path={policy})" if policy.exists() else ""
        raise BadInput(f"--resume: {'. '.join(one.why for one in found)}{start}")


def changed_keys(config: Config, then: JsonObject) -> list[str]:
    """The keys whose values differ from those in a checkpoint, but for those that say which run it is."""
    before = flatten_keys(then)
    now = flatten_keys(config.model_dump(mode="json"))
    return [key for key in now if now[key] != before.get(key) and key not in (*keys_of("place"), "run.accept")]


def _changed_settings(config: Config, then: JsonObject, step: int) -> Iterator[KeyDifference]:
    """The fixed keys that change. If all steps are trained, also those of the plan: config.toml would describe settings
    with which no step was trained."""
    tables = config.model_dump(mode="json")
    through = step == config.train.steps
    for key in keys_of("fixed", "plan") if through else keys_of("fixed"):
        now = value_of(tables, key)
        try:
            before = value_of(then, key)
        except KeyError:
            why = f"the run's checkpoint has no {key}: another version of Metronome wrote it; continue the run with it"
            yield KeyDifference(key, now, None, f"{why}, or {ANEW}")
            continue
        if _is_same(MARKS[key].compared(now), MARKS[key].compared(before)):
            continue
        if MARKS[key].rule == "fixed":
            why = f"{key} is {now!r}, but the run has {before!r}; a resumed run keeps its value. Leave it out"
        else:
            why = f"all {step} steps are trained, so {key} = {now!r} would have no effect; also give train.steps"
        yield KeyDifference(key, now, before, f"{why}, or {ANEW}")


def _is_same(one: object, other: object) -> bool:
    """Whether two values are the same in JSON, where true is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _other_model(config: Config, state: Mapping[str, Any], shape: JsonObject) -> Iterator[KeyDifference]:
    own = value_of(state["config"], "model.path")
    if sizes := sorted(key for key in shape if shape[key] != state["model"].get(key)):
        why = (
            f"model.path = {config.model.path!r}: its sizes differ from those of the run's base model "
            f"({', '.join(sizes)}); give model.path = {own!r}, or a copy of it, or {ANEW} to train this model"
        )
        yield KeyDifference("model.path", config.model.path, own, why)


def _unknown_prompts(config: Config, state: Mapping[str, Any]) -> Iterator[KeyDifference]:
    """What a checkpoint that a replay wrote does not say."""
    if config.algorithm.dynamic_sampling and state["step"] and state.get("prompt_position") is None:
        why = (
            f"the checkpoint after {counted(state['step'], 'step')} does not say how many prompts were used, which "
            f"algorithm.dynamic_sampling needs (a replay wrote it); {ANEW}"
        )
        yield KeyDifference("algorithm.dynamic_sampling", True, True, why)
    now = config.model_dump(mode="json")["data"]["train"]
    then = state["config"]["data"].get("train")
    if state["step"] and state.get("prompts") is None and now != then:
        why = (
            f"data.train is {now!r}, but the run has {then!r}; its checkpoint does not say what that held (a replay "
            f"wrote it). Leave it out, or {ANEW}"
        )
        yield KeyDifference("data.train", now, then, why)
