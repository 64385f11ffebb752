"""docs/configuration.md, generated from the config tree:
`python -m engine.config.reference > docs/configuration.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from engine.config import Config
from engine.config.table import Table, is_table

HEAD = """# Configuration

Every key of a recipe. Generated from `engine/config` by `python -m engine.config.reference > docs/configuration.md`:
edit the docstrings there. A recipe is a TOML file with these tables; `--set table.key=value` overrides a key,
`--set table.table.key=value` one of a table inside a table. Unknown keys and values out of range are refused with the
nearest key or the range. Which keys go together is checked too (`engine/config/rules.py`).
"""
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
"""JSON schema's words for ranges, in ours."""
NAMES = {"boolean": "true or false", "array": "list", "object": "table"}
"""JSON schema's types that a recipe's writer would not know."""


def reference() -> str:
    """The page, in Markdown."""
    kinds = Config.model_json_schema()["$defs"]
    return "\n".join([HEAD, *("\n".join(_table(name, kinds[kind.__name__], kind)) for name, kind in _tables(Config))])


def _tables(table: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[Table]]]:
    """All tables in a table, by their dotted names."""
    for name, field in table.model_fields.items():
        if is_table(field.annotation):
            yield f"{prefix}{name}", field.annotation
            yield from _tables(field.annotation, f"{prefix}{name}.")


def _table(name: str, schema: dict[str, Any], table: type[Table]) -> Iterator[str]:
    """Heading, the table's own docstring and a row for each key."""
    yield f"## {name}\n"
    yield f"{_line(schema.get('description', ''))}\n"
    yield "| key | default | value | meaning |"
    yield "|---|---|---|---|"
    for key, kind in schema["properties"].items():
        if is_table(table.model_fields[key].annotation):
            continue
        default = table.model_fields[key].get_default(call_default_factory=True)
        shown = "–" if default is PydanticUndefined else f"`{_toml(default)}`"
        yield f"| `{name}.{key}` | {shown} | {_kind(kind)} | {_line(kind.get('description', ''))} |"
    yield ""


def _toml(value: Any) -> str:  # noqa: ANN401
    """As it is written in a recipe."""
    if isinstance(value, float) and value and abs(value) < 1e-2:
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False, default=list).replace("|", "\\|")


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _kind(schema: dict[str, Any]) -> str:
    """What values a key takes."""
    if "anyOf" in schema:
        return ", or ".join(_kind(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{_toml(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{_toml(schema['const'])}`"
    kind = NAMES.get(schema.get("type", "any"), schema.get("type", "any"))
    if schema.get("type") == "array":
        items = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
        return f"list of {_kind(items)}" if items else kind
    return " ".join([kind, *(f"{word} {schema[bound]:g}" for bound, word in BOUNDS.items() if bound in schema)])


if __name__ == "__main__":
    sys.stdout.write(reference())
