"""Read a recipe: TOML and `--set key=value` become a `Config`, and each mistake becomes one clear `BadInput`."""

from __future__ import annotations

import datetime
import difflib
import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from engine.config import Config
from engine.config.keys import flatten_keys, nest_keys
from engine.config.other_names import KEYS, find_other_name
from engine.config.placing import all_joining
from engine.config.table import is_table, named_table, tables_in
from engine.errors import BadInput
from engine.types import JsonObject

HOME = Path(__file__).resolve().parents[2]
"""Metronome's own folder: shipped recipes and data are found relative to it."""
WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
}
"""Pydantic's name of a type → its words in a message."""
TEXT_KEYS = frozenset(
    f"{name}.{key}"
    for name, table in tables_in(Config)
    for key, field in table.model_fields.items()
    if field.annotation is str
)
"""Keys whose value is a text: `--set run.name=2026-11-25` is no date."""


def find_file(path: str) -> Path:
    """Return the path as given if it is absolute or exists from the current folder, else the same path in
    Metronome's own folder if that exists, else the path as given."""
    here = Path(path).expanduser()
    if here.is_absolute() or here.exists():
        return here
    shipped = HOME / here
    return shipped if shipped.exists() else here


SMOLLM2 = "data/smollm2"
"""Folder of the pretrained model of infra/recipes/smollm2*.toml, which the repository does not have."""


def check_made(path: str) -> None:
    """Raise BadInput if a model's path is that of SmolLM2, and it is not there yet."""
    if path == SMOLLM2 and not find_file(path).is_dir():
        raise BadInput(
            f"model.path = {path!r} is not there yet: `make smollm2` makes it and trains it (`make {path}` only makes "
            f"it; without make: python -m data.make_smollm2, in {HOME})"
        )


PATHS = ("model.path", "data.train", "data.heldout", "evaluate.folder", "evaluate.benchmark", "checkpoint.path")
"""Keys that name files of the user's. checkpoint.path may name a folder that is not there yet, or an address."""
FUNCTIONS = (
    "reward.function",
    "reward.functions",
    "rollout.program",
    "algorithm.advantage",
    "algorithm.loss",
    "algorithm.gradient_control",
)
"""Keys that may name functions in such files."""


def _with_absolute_paths(flat: JsonObject) -> JsonObject:
    """The keys with files of the user's by their absolute paths, so that the config.toml of a run can be used from any
    folder. What `find_file` finds from any folder stays as it is, and so do names on the hub and of benchmarks."""
    return {key: _absolute(value, key) if key in (*PATHS, *FUNCTIONS) else value for key, value in flat.items()}


def _absolute(value: Any, key: str) -> Any:  # noqa: ANN401
    if isinstance(value, list):
        return [_absolute(one, key) for one in value]
    if isinstance(value, dict):
        return {name: _absolute(one, key) if name in ("path", "function") else one for name, one in value.items()}
    if not isinstance(value, str):
        return value
    if key == "evaluate.benchmark" and "," in value:
        return ",".join(_absolute(one.strip(), key) for one in value.split(","))
    place, colon, function = value.rpartition(":") if key in FUNCTIONS else (value, "", "")
    if key == "checkpoint.path":
        return os.path.abspath(value) if value and "://" not in value and not value.startswith("~") else value
    here = Path(place)
    named = key == "evaluate.benchmark" and not here.suffix and "/" not in place
    named |= key in FUNCTIONS and not place.endswith(".py")  # a module, even if its folder is here
    shipped = HOME / here
    if not place or named or not os.path.exists(here) or (shipped.exists() and shipped.samefile(here)):
        return value
    return f"{here.absolute()}{colon}{function}"


def load_config(recipe: str | os.PathLike[str] | None, overrides: Iterable[str] = ()) -> Config:
    """Read a recipe file (None: all defaults), apply `key=value` overrides and check everything.

    Without run.name the run is named after the recipe and the present time. Raises BadInput with file or key, what is
    wrong and what would be right.
    """
    where = str(recipe) if recipe is not None else "--set"
    in_file = recipe_keys(recipe) if recipe is not None else {}
    overriding = override_keys(overrides)
    nest_keys(in_file, where)  # a mistake of the file alone is blamed on it
    tree = nest_keys(_with_absolute_paths({**in_file, **overriding}), "--set")
    try:
        config = all_joining(Config.model_validate(tree))
    except ValidationError as error:
        blamed = "--set" if _is_of(error, in_file, overriding) else where
        raise BadInput(f"{blamed}: {_first_mistake(error)}") from None
    if config.run.name:
        return config
    stem = re.sub(r"[^\w.-]", "-", Path(recipe).stem, flags=re.ASCII).lstrip(".") if recipe is not None else "run"
    name = f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def _is_of(error: ValidationError, in_file: JsonObject, overriding: JsonObject) -> bool:
    """Whether the first mistake is one of the overrides: in their keys, or against a rule that the file alone keeps."""
    at = ".".join(map(str, error.errors()[0]["loc"]))
    if any(f"{at}.".startswith(f"{key}.") for key in overriding):
        return True
    if any(f"{at}.".startswith(f"{key}.") for key in in_file):
        return False
    try:
        Config.model_validate(nest_keys(in_file, ""))
    except ValidationError:
        return False
    return bool(overriding)


def recipe_keys(recipe: str | os.PathLike[str]) -> JsonObject:
    """The keys that a recipe file has, by their dotted names. A variant has those of its `base`, a recipe in the same
    folder, but for its own. Raises BadInput if a file can't be read, or if a base is a variant itself."""
    own = _read_toml(recipe)
    base = own.pop("base", None)
    if base is None:
        return flatten_keys(own)
    if not isinstance(base, str) or Path(base).name != base:
        raise BadInput(
            f"recipe {recipe}: base = {base!r}: must be a string, the file name of a recipe in the same folder"
        )
    path = find_file(os.fspath(recipe)).parent / base
    theirs = _read_toml(path)
    if "base" in theirs:
        raise BadInput(f"recipe {recipe}: its base {path} is itself a variant; give a recipe without a base")
    return {**flatten_keys(theirs), **flatten_keys(own)}


def override_keys(overrides: Iterable[str]) -> JsonObject:
    """The keys of `key=value` overrides, by their dotted names. Raises BadInput for a text of another form."""
    return flatten_keys(dict(map(_parse_override, overrides)))


def _read_toml(recipe: str | os.PathLike[str]) -> dict[str, Any]:
    path = find_file(os.fspath(recipe))
    if not path.is_file():
        raise BadInput(
            f"recipe {recipe}: no such file; recipes that ship with Metronome are in {HOME / 'infra/recipes'}"
        )
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"recipe {path}: not valid TOML: {error}") from None


def _parse_override(override: str) -> tuple[str, Any]:
    """(key, value) of `key=value`. A value that is not TOML is a text, and so is every value of a text key."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        if equals and find_other_name(key.strip()):
            raise BadInput(f"--set: {_other_name(key.strip())}")
        raise BadInput(f"--set {override}: expected table.key=value, for example --set rollout.group_size=8")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return key.strip(), text.strip() if key.strip() in TEXT_KEYS and not isinstance(value, str) else value


def _first_mistake(error: ValidationError) -> str:
    """The first mistake in one line: the dotted key and what is wrong; for an unknown key the one that is meant."""
    mistake = error.errors()[0]
    key = ".".join(str(part) for part in mistake["loc"])
    if mistake["type"] == "extra_forbidden":
        return _unknown_key(mistake["loc"], mistake["input"])
    if mistake["type"] == "value_error":
        return str(mistake["ctx"]["error"])
    place = _key_part(mistake["loc"])
    if len(mistake["loc"]) == len(place) or isinstance(mistake["loc"][len(place)], int):
        return f"{key} = {mistake['input']!r}: {_in_words(mistake)}"
    # the key takes several types: say what each of them reports
    said = [_in_words(other) for other in error.errors() if other["loc"][: len(place)] == place]
    return f"{'.'.join(map(str, place))} = {mistake['input']!r}: {', or: '.join(said)}"


def _in_words(mistake: ErrorDetails) -> str:
    """What a value must be. Pydantic's own sentence also says how it has tried to read a text as another type."""
    for kind, what in WORDS.items():
        if mistake["type"] in (f"{kind}_parsing", f"{kind}_type", f"{kind}_from_float"):
            return f"must be {what}"
    return mistake["msg"].removeprefix("Value error, ").replace("Input should be ", "must be ", 1)


def _key_part(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The leading part of a mistake's location that names tables and the key; the rest is inside the value."""
    place: Any = Config
    for depth, part in enumerate(loc):
        if inner := named_table(place):
            place = inner
        elif is_table(place):
            place = place.model_fields[str(part)].annotation
        else:
            return loc[:depth]
    return loc


def _unknown_key(loc: tuple[int | str, ...], value: object) -> str:
    """The message about an unknown key, or unknown table: what it means if another library has it, else the valid key
    that is most like it. A key in a table that the recipe names stays in it."""
    key = ".".join(map(str, loc))
    field = Config.model_fields.get(str(loc[0]))
    named = named_table(field.annotation) if field is not None else None
    inner = [f"{key}.{name}" for name in flatten_keys(value)] if isinstance(value, dict) else []
    if told := "" if named else next(filter(None, map(_other_name, [*inner, key])), ""):
        return told
    names: Iterable[str] = Config.model_fields
    if len(loc) > 1:
        names = [f"{loc[0]}.{loc[1]}.{key}" for key in named.model_fields] if named else KEYS
    close = difflib.get_close_matches(key, sorted(names), n=1, cutoff=0.0)
    return f"unknown key {key}; did you mean {close[0]}?"


def _other_name(key: str) -> str:
    """The message about a key of another library; "" if it is of none."""
    ours = find_other_name(key)
    return (
        f"unknown key {key}; did you mean {ours}?"
        if ours in KEYS
        else ours and f"unknown key {key}: in Metronome {ours}"
    )
