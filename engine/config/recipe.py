"""Reading a recipe: TOML and `--set key=value` into a `Config`, every mistake one clear `BadInput`."""

from __future__ import annotations

import datetime
import difflib
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.config import Config
from engine.config.keys import accepted, flatten, nest
from engine.config.table import is_table
from engine.errors import BadInput

HOME = Path(__file__).resolve().parents[2]
"""Metronome's own folder: shipped recipes and data are found relative to it."""


def find(path: str) -> Path:
    """The path as given from the current folder if it exists there, else from Metronome's own folder, else as given."""
    here = Path(path).expanduser()
    if here.is_absolute() or here.exists():
        return here
    shipped = HOME / here
    return shipped if shipped.exists() else here


def load(recipe: str | os.PathLike[str] | None, overrides: Iterable[str] = ()) -> Config:
    """Read a recipe file (None: all defaults), apply `key=value` overrides, check everything.

    Raises BadInput with file or key, what is wrong and what would be right.
    """
    where = str(recipe) if recipe is not None else "--set"
    given = accepted(flatten(_read(recipe)), where) if recipe is not None else {}
    given |= accepted(flatten(dict(map(_pair, overrides))), "--set")
    try:
        config = Config.model_validate(nest(given, where))
    except ValidationError as error:
        raise BadInput(f"{where}: {_first(error)}") from None
    if config.run.name:
        return config
    stem = Path(recipe).stem if recipe is not None else "run"
    name = f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def _read(recipe: str | os.PathLike[str]) -> dict[str, Any]:
    path = find(os.fspath(recipe))
    if not path.is_file():
        raise BadInput(
            f"recipe {recipe}: no such file; recipes that ship with Metronome are in {HOME / 'infra/recipes'}"
        )
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"recipe {path}: not valid TOML: {error}") from None


def _pair(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise BadInput(f"--set {override}: expected table.key=value, for example --set rollout.group_size=8")
    try:
        return key.strip(), tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()


def _first(error: ValidationError) -> str:
    """The first mistake in one line: dotted key, what is wrong, for an unknown key the nearest valid one."""
    mistake = error.errors()[0]
    key = ".".join(str(part) for part in mistake["loc"])
    if mistake["type"] == "extra_forbidden":
        return f"unknown key {key}; {_nearest(mistake['loc'])}"
    if mistake["type"] == "value_error":
        return str(mistake["ctx"]["error"])
    place = _place(mistake["loc"])
    if len(mistake["loc"]) == len(place) or isinstance(mistake["loc"][len(place)], int):
        return f"{key} = {mistake['input']!r}: {mistake['msg']}"
    # a key of several types: what each of them says
    said = [other["msg"] for other in error.errors() if other["loc"][: len(place)] == place]
    return f"{'.'.join(map(str, place))} = {mistake['input']!r}: {', or: '.join(said)}"


def _place(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The part of a mistake's place that names tables and a key; what follows is inside of the value."""
    table: Any = Config
    for depth, part in enumerate(loc, 1):
        field = table.model_fields.get(part)
        if field is None or not is_table(field.annotation):
            return loc[:depth]
        table = field.annotation
    return loc


def _nearest(loc: tuple[int | str, ...]) -> str:
    names = flatten(Config().model_dump()) if len(loc) > 1 else Config.model_fields
    close = difflib.get_close_matches(".".join(map(str, loc)), sorted(names), n=1, cutoff=0.0)
    return f"did you mean {close[0]}?"
