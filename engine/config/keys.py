"""The dotted names of keys, as `--set`, MLflow and records write them, and the names of the last release."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from engine.errors import BadInput
from engine.types import JsonObject

Value = TypeVar("Value")

RENAMED = {
    "algorithm.m2_threshold": "algorithm.m2po.threshold",
    "algorithm.bapo_share": "algorithm.bapo.share",
    "algorithm.bapo_low": "algorithm.bapo.low",
    "algorithm.bapo_high": "algorithm.bapo.high",
    "rollout.joining": "dry_run.joining",
}
"""Old key → new key. Old keys are read for one release."""
STATE = {"model.start": "start", "model.continued_from": "continued_from"}
"""Keys that were state of a run → their names in its start.json (`engine.run.start`). As settings they have no
effect."""


def flatten(tree: Mapping[str, Any]) -> JsonObject:
    """{"run": {"seed": 0}} → {"run.seed": 0}, to any depth."""
    flat: JsonObject = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}.{rest}": inner for rest, inner in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def nest(flat: Mapping[str, Any], where: str) -> JsonObject:
    """The inverse of `flatten`. Raises BadInput if one key is both a value and a table; `where`: the keys' source, for
    the message."""
    tree: JsonObject = {}
    for key, value in flat.items():
        *tables, name = key.split(".")
        table = tree
        for depth, part in enumerate(tables, 1):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise BadInput(f"{where}: {key} = {value!r}: {'.'.join(tables[:depth])} = {table!r} is not a table")
        table[name] = value
    return tree


def current_names(flat: Mapping[str, Value]) -> dict[str, Value]:
    """Return keys of this or the last release under their present names, without the keys of `STATE`. Where both names
    of a key are given, the value of the new one counts."""
    moved = {RENAMED[key]: value for key, value in flat.items() if key in RENAMED}
    return moved | {key: value for key, value in flat.items() if key not in RENAMED and key not in STATE}


def accepted(flat: Mapping[str, Any], where: str) -> JsonObject:
    """Return `current_names` of keys that a person wrote in one place (`where`). One warning names the old keys there.
    Raises BadInput for a key that is given under both names."""
    old = [key for key in (*RENAMED, *STATE) if key in flat]
    for key in old:
        new = RENAMED.get(key, "")
        if twice := next((given for given in flat if new and f"{given}.".startswith(f"{new}.")), None):
            raise BadInput(f"{where}: {key} and {twice} are the old and the new name of one key; give {new} only")
    if old:
        named = ", ".join(f"{key} ({_present_place(key)})" for key in old)
        _warn(f"{where}: old keys, which the next release refuses: {named}")
    return current_names(flat)


def _present_place(key: str) -> str:
    return f"now {RENAMED[key]}" if key in RENAMED else f"now {STATE[key]!r} in start.json, which the run itself writes"


@cache
def _warn(message: str) -> None:
    """Print a warning, each message once in a process, however often it reads the recipe."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
