"""The dotted names of keys, as `--set`, MLflow and records write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import BadInput
from engine.types import JsonObject


def flatten_keys(tree: Mapping[str, Any]) -> JsonObject:
    """{"run": {"seed": 0}} → {"run.seed": 0}, to any depth."""
    flat: JsonObject = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}.{rest}": inner for rest, inner in flatten_keys(value).items()}
        else:
            flat[key] = value
    return flat


def nest_keys(flat: Mapping[str, Any], where: str) -> JsonObject:
    """The inverse of `flatten_keys`. Raises BadInput if one key is both a value and a table; `where`: the keys' source,
    for the message."""
    tree: JsonObject = {}
    for key, value in flat.items():
        *tables, name = key.split(".")
        table = tree
        for depth, part in enumerate(tables, 1):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise BadInput(f"{where}: {key} = {value!r}: {'.'.join(tables[:depth])} = {table!r} is not a table")
        table[name] = {} if value == {} else value  # an empty table gets keys of its own here
    return tree
