"""Finds the run that `--resume` means. The run's own config.toml counts; the keys of the command change it.

A resume that cannot work is rejected here, before anything in the run is written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.config.keys import flatten_keys
from engine.config.recipe import find_file, load_config, override_keys, recipe_keys
from engine.data.named_models import is_of_name
from engine.data.prepared import training_hash
from engine.data.problem_statistics import REPORT, read_report
from engine.errors import BadInput
from engine.run.folder import RunFolder
from engine.run.resume import keys_of
from engine.run.run_file import read_run
from engine.types import JsonObject
from tasks.terminal.console import say

PLACE = keys_of("place")
NEWEST = 5
"""Number of runs that the message lists when no run is named."""


@dataclass(frozen=True)
class Resumed:
    """A run, new or to be continued."""

    config: Config
    """The run's config, with the keys of the command."""
    recipe: str
    """The recipe with which the run began."""
    notes: tuple[str, ...] = ()
    """Lines for the person who resumes it."""

    def tell(self) -> None:
        """Print the notes."""
        for note in self.notes:
            say("resume", note)


def identifying_keys(config: Config) -> list[str]:
    """The keys that identify the run, as KEY=VALUE."""
    return [f"run.name={json.dumps(config.run.name)}", f"run.output={json.dumps(config.run.output)}"]


def find_resumed(recipe: str | None, given: Sequence[str], below: Sequence[str] = ()) -> Resumed:
    """Find the run that a command with `--resume` means. `given`: the keys of the command, KEY=VALUE each;
    `below`: those of its deploy, which say where the run is but do not change it.

    `recipe`: the recipe that the command names, if any. It only says where the run is; a value in it that differs from
    the run's is reported and ignored. If the run folder is lost but `checkpoint.path` has its checkpoints, the recipe
    counts. Raises BadInput if there is no such run, or if a key cannot change.
    """
    keys = override_keys(given)
    named = {**override_keys(below), **keys}
    named = {**recipe_keys(recipe), **named} if recipe and not named.keys() >= set(PLACE) else named
    place = load_config(None, [f"{key}={json.dumps(named[key])}" for key in PLACE if key in named])
    if not named.get("run.name"):
        raise BadInput(_which(Path(place.run.output)))
    folder = RunFolder(place.folder)
    if not folder.config.exists():
        return _without_folder(recipe, [*below, *given], place)
    own = folder.read_config()
    kept = [one for one in given if one.partition("=")[0].strip() not in PLACE]
    if own.cluster.engine == "ray" and "rollout.instances" in keys and "dry_run.joining" not in keys:
        # on Ray all instances join, so the run's own joining counts those of the command already
        beside = {**(recipe_keys(recipe) if recipe else {}), **override_keys(below)}
        kept.append(f"dry_run.joining={beside.get('dry_run.joining', 0)}")
    config = load_config(folder.config, kept)
    there = {"name": place.run.name, "output": place.run.output} | ({} if "run.accept" in keys else {"accept": ()})
    config = config.model_copy(update={"run": config.run.model_copy(update=there)})
    _check_moved(config, own)
    begun = read_run(folder.path).start
    ignored = list(_ignored(recipe, keys, own, begun.start == "base")) if recipe else []
    changed = [f"{key} = {now!r} (was {then!r})" for key, now, then in differing_keys(config, own, keys)]
    by_command = f"; changed by this command: {', '.join(changed)}" if changed else ""
    notes = [f"{place.run.name} continues with its own config.toml{by_command}"]
    if ignored:
        notes.append(
            f"{recipe} is not read again, so these have no effect: {', '.join(ignored)}; to change a key, give it "
            "with --set"
        )
    return Resumed(config, begun.recipe or recipe or "", tuple(notes))


def _check_moved(config: Config, own: Config) -> None:
    """Raise BadInput if data.train names other files than the run's config, and these have another content than the run
    folder recorded (data.json), or it recorded none."""
    if config.data.sets == own.data.sets:
        return
    report = read_report(config.folder)
    then = report["train"]["content_hash"] if report is not None else ""
    if (now := training_hash(config)) != then:
        raise BadInput(
            f"--resume: data.train is {config.data.train!r}, but the run has {own.data.train!r}; a file may lie "
            f"elsewhere now, but {_other_content(now, then)}; a resumed run keeps its problems. Name the same ones, or "
            "start a new run with these (another run.name)"
        )


def _other_content(now: str, then: str) -> str:
    if not then:
        return f"the run folder does not say what it held ({REPORT})"
    return f"its content has the SHA-256 {now[:12]}…, and that of the run {then[:12]}… ({REPORT})"


def _which(output: Path) -> str:
    runs = sorted(output.glob("*/config.toml"), key=lambda file: file.stat().st_mtime, reverse=True)
    newest = ", ".join(file.parent.name for file in runs[:NEWEST])
    return "--resume: name the run to continue by --set run.name=NAME; " + (
        f"the newest in {output}: {newest}" if runs else f"{output} (run.output) has no run"
    )


def _without_folder(recipe: str | None, given: Sequence[str], place: Config) -> Resumed:
    if recipe is None:
        raise BadInput(
            f"--resume: {place.folder} is not a run folder; name the run to continue by --set run.name=NAME. If its "
            "folder is lost and its checkpoints are in checkpoint.path, also name its recipe and its settings"
        )
    config = load_config(recipe, given)
    return Resumed(config, recipe, (f"{place.folder} is lost; the run continues with {recipe}",))


def differing_keys(config: Config, own: Config, keys: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key among `keys` (keys or whole tables) whose value differs from the run's, with both values."""
    now = flatten_keys(config.model_dump(mode="json"))
    then = flatten_keys(own.model_dump(mode="json"))
    for key in now:
        if key not in PLACE and now[key] != then.get(key) and any(f"{key}.".startswith(f"{one}.") for one in keys):
            yield key, now[key], then.get(key)


def _ignored(recipe: str, keys: JsonObject, own: Config, from_base: bool) -> Iterator[str]:
    """The keys of a recipe whose values differ from the run's, each with both values."""
    theirs = load_config(recipe)
    for key, value, then in differing_keys(theirs, own, {key: None for key in recipe_keys(recipe) if key not in keys}):
        if key == "model.path" and (not from_base or _same_path(value, then)):
            continue  # the run uses the folder that the recipe means, or started from another policy
        if key != "run.seed" or from_base:
            yield f"{key} = {value!r} (the run has {then!r})"


def _same_path(one: str, other: str) -> bool:
    """Whether two values of `model.path` mean the same folder, or the first the name of the second's model."""
    return find_file(one).resolve() == find_file(other).resolve() or is_of_name(Path(other), one)
