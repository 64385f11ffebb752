"""Generate infra/recipes/schema.json from the config tree, with which editors complete and check the keys of a recipe:
`python -m engine.config.schema > infra/recipes/schema.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.config.table import LARGEST
from engine.types import JsonObject

SCHEMA = Path(__file__).resolve().parents[2] / "infra/recipes/schema.json"
"""The generated file, which is part of the package. A recipe names it in a line `#:schema`, as taplo reads it (in VS
Code: Even Better TOML)."""
BASE = "File name of a recipe in the same folder. Keys that are not set here have the values that they have there."


def recipe_schema() -> JsonObject:
    """The JSON schema (draft 7, which taplo knows) of a recipe: every table and key with its meaning, type, bounds and
    default. Rules between keys are not in it; a run and `run.dry` check them."""
    tree = Config.model_json_schema()
    found = _inlined({**tree, "title": "A recipe of Metronome"}, tree["$defs"])
    del found["$defs"]
    base = {"type": "string", "description": BASE}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **found,
        "properties": {"base": base} | found["properties"],
    }


def _inlined(node: Any, kinds: JsonObject, name: str = "") -> Any:  # noqa: ANN401
    """A part of Pydantic's schema in draft 7, which has no keys beside `$ref` and no `prefixItems`. `name`: the name of
    the key, if the part is one."""
    if isinstance(node, list):
        return [_inlined(one, kinds) for one in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        beside = {key: value for key, value in node.items() if key not in ("$ref", "default")}
        return _inlined({**kinds[node["$ref"].rpartition("/")[2]], **beside}, kinds, name)
    found: JsonObject = {}
    for key, value in node.items():
        if key == "properties":
            found[key] = {inner: _inlined(one, kinds, inner) for inner, one in value.items()}
        elif key == "description":
            found[key] = " ".join(value.split())
        elif key == "prefixItems":
            found["items"] = _inlined(value, kinds)
        elif key in ("default", "enum", "const", "$defs"):
            found[key] = value
        elif key != "title" or "$defs" in node:
            found[key] = _inlined(value, kinds)
    if node.get("type") == "integer" and name != "seed":
        found.setdefault("maximum", LARGEST)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(recipe_schema(), indent=1, ensure_ascii=False) + "\n")
