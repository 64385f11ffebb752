"""Generate docs/configuration.md from the config tree:
`python -m engine.config.reference > docs/configuration.md`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from engine.config import Config
from engine.config.table import Table, is_value, tables_in

HEAD = """# Configuration

Every key of a recipe. Generated from `engine/config` by `python -m engine.config.reference > docs/configuration.md`:
edit the docstrings there. A recipe is a TOML file with these tables. `--set table.key=value` overrides a key,
`--set table.table.key=value` a key of a table inside a table. NAME stands for a name of your choice: there may be
several such tables. `base = "other.toml"` at the top of a recipe makes it a variant of that recipe, in the same
folder: only the keys that the variant sets differ. `metronome init` writes a recipe. With a first line `#:schema` and
the path of `infra/recipes/schema.json`, editors that know taplo (VS Code: Even Better TOML) complete and check keys. An
unknown key is refused with the nearest valid one, a value out of range with the range. Keys that can't be combined are
refused too (`engine/config/rules.py`).
"""
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
"""JSON schema's name of a bound → its words on the page."""
_SENTENCE = re.compile(r"(?<=[.])\s+(?=[A-Z\"`])")
NAMES = {"boolean": "true or false", "array": "list", "object": "table"}
"""JSON schema's name of a type → its name on the page, where the two differ."""


MAIN_KEYS = (
    *("model.path", "data.train", "data.heldout", "reward.function"),
    *("rollout.engine", "rollout.devices", "rollout.group_size", "rollout.max_new_tokens"),
    *("train.mode", "train.steps", "train.prompts_per_step", "train.learning_rate"),
)
"""The twelve keys that most recipes set first."""


def meaning_of(key: str) -> str:
    """The first sentence of what a dotted key means, and its values where they are few. Raises KeyError for no key of
    the config."""
    table, _, name = key.rpartition(".")
    field = dict(tables_in(Config))[table].model_fields[name]
    first = str(_SENTENCE.split(" ".join((field.description or "").split()))[0])
    values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return first.removesuffix(".") + f": {', '.join(map(json.dumps, values))}." if values else first


def main_keys() -> str:
    """The keys of MAIN_KEYS with their meanings, one a paragraph."""
    return "\n\n".join(f"{key}: {meaning_of(key)}" for key in MAIN_KEYS)


def reference_page() -> str:
    """Return the page in Markdown."""
    kinds = Config.model_json_schema()["$defs"]
    return "\n".join(
        [HEAD, *("\n".join(_section(name, kinds[kind.__name__], kind)) for name, kind in tables_in(Config))]
    )


def _section(name: str, schema: dict[str, Any], table: type[Table]) -> Iterator[str]:
    """The lines of one table: heading, the table's own docstring and a row for each key."""
    yield f"## {name}\n"
    yield f"{_cell(schema.get('description', ''))}\n"
    yield "| key | default | value | meaning |"
    yield "|---|---|---|---|"
    for key, kind in schema["properties"].items():
        if not is_value(table.model_fields[key].annotation):
            continue
        default = table.model_fields[key].get_default(call_default_factory=True)
        shown = "–" if default is PydanticUndefined else f"`{_toml(default)}`"
        yield f"| `{name}.{key}` | {shown} | {_values(kind)} | {_cell(kind.get('description', ''))} |"
    yield ""


def _toml(value: Any) -> str:  # noqa: ANN401
    """The value as it is written in a recipe."""
    if isinstance(value, float) and value and abs(value) < 1e-2:
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False, default=list).replace("|", "\\|")


def _cell(text: str) -> str:
    """The text on one line, as a cell of a table takes it."""
    return " ".join(text.split()).replace("|", "\\|")


def _values(schema: dict[str, Any]) -> str:
    """The values that a key takes, in words."""
    if "anyOf" in schema:
        return ", or ".join(_values(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{_toml(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{_toml(schema['const'])}`"
    if "$ref" in schema:
        return "table"
    kind = NAMES.get(schema.get("type", "any"), schema.get("type", "any"))
    if schema.get("type") == "array":
        items = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
        inner = f"({_values(items)})" if "anyOf" in items else _values(items)
        return f"list of {inner}" if items else kind
    return " ".join([kind, *(f"{word} {schema[bound]:g}" for bound, word in BOUNDS.items() if bound in schema)])


if __name__ == "__main__":
    sys.stdout.write(reference_page())
