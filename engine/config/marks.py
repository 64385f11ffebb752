"""What a resumed run may do with a key, said on the key itself: a mark in its annotation.

A key without a mark may change freely. The mark of a table counts for those of its keys that have none of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.config.table import Table, is_table

Rule = Literal["place", "fixed", "plan", "content"]


@dataclass(frozen=True)
class Mark:
    """What may become of a key when a run is resumed."""

    rule: Rule
    """"place": the key says which run it is. "fixed": it stays. "plan": it stays for a replay, for a record that goes
    on, and where no step is left to train; so do the fixed ones. "content": it may name something else that holds the
    same."""
    compared: Callable[[Any], Any] = lambda value: value
    """What of the value is compared."""
    part: str = ""
    """The part of the run's inputs in which the code is that the key names (engine.run.run_inputs)."""


def name_code(spec: str) -> str:
    """What a value of a key names, wherever the file of a function lies: "loss.py:own" for "/some/folder/loss.py:own",
    and any other value as it is."""
    place, colon, function = spec.rpartition(":")
    return f"{Path(place).name}{colon}{function}" if place.endswith(".py") else spec


def _weights(sets: str | Sequence[str | Mapping[str, Any]]) -> list[float | None]:
    """The weights of the sets. Their files may lie elsewhere, and their content is compared by itself."""
    given = [sets] if isinstance(sets, str) else sets
    return [one.get("weight") if isinstance(one, Mapping) else None for one in given]


PLACE = Mark("place")
FIXED = Mark("fixed")
FIXED_SETS = Mark("fixed", _weights)
FIXED_FILES = Mark("fixed", lambda files: [Path(file).name for file in files])
FIXED_CODE = Mark("fixed", name_code, "algorithms")
PLAN = Mark("plan")
PLAN_CODE = Mark("plan", name_code, "algorithms")
CONTENT = Mark("content")
REWARD_CODE = Mark("content", part="reward")


def marked_keys(table: type[Table], prefix: str = "", above: Mark | None = None) -> Iterator[tuple[str, Mark]]:
    """(dotted key, mark) of all keys inside a table that have one. Tables that the recipe names are one key. `above`:
    the mark of the table."""
    for name, field in table.model_fields.items():
        mark = next((one for one in field.metadata if isinstance(one, Mark)), above)
        if is_table(field.annotation):
            yield from marked_keys(field.annotation, f"{prefix}{name}.", mark)
        elif mark is not None:
            yield f"{prefix}{name}", mark


def value_of(tables: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401
    """The value of a dotted key in a config's tables. Raises KeyError if it is not there."""
    found: Any = tables
    for part in key.split("."):
        found = found[part]
    return found
