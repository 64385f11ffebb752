"""What is said about a key on the key itself: marks in its annotation, or in that of its table.

`Mark`: what a resumed run may do with it. Without one it may change freely; the innermost counts. `ReadIf`: when it is
read. Without one it is read in every run, or whenever something happens (an instance dies); all of them must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

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


def name_functions(value: str | Sequence[Mapping[str, Any]]) -> Any:  # noqa: ANN401
    """`name_code` of a key that names a function, or several in tables."""
    if isinstance(value, str):
        return name_code(value)
    return [{**one, "function": name_code(one["function"])} for one in value]


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
REWARD_CODE = Mark("content", name_functions, "reward")


OWN = "a function of your own"
"""Among the values of `only_with`: any function of the user's."""


@dataclass(frozen=True)
class ReadIf:
    """The condition without which nothing reads a key, so that it has no effect."""

    condition: Callable[[Any], bool]
    """Takes the config."""
    words: str
    """The condition for people, after "it is only read"."""


def only_with(key: str, *values: str) -> ReadIf:
    """The key is read if another `key` has one of these values; without any, if that is neither 0, off nor empty."""

    def holds(config: Any) -> bool:  # noqa: ANN401
        found = attrgetter(key)(config)
        return found in values or (OWN in values and ":" in found) if values else bool(found)

    named = " or ".join(value if value == OWN else f'"{value}"' for value in values)
    return ReadIf(holds, f"with {key}" + (f" = {named}" if values else ""))


_M = TypeVar("_M")


def marked_keys(
    table: type[Table], kind: type[_M], prefix: str = "", above: tuple[_M, ...] = ()
) -> Iterator[tuple[str, tuple[_M, ...]]]:
    """(dotted key, its marks of this kind) of all keys inside a table that have one, its own after those of its tables.
    Tables that the recipe names are one key. `above`: the marks of the table."""
    for name, field in table.model_fields.items():
        marks = (*above, *(one for one in field.metadata if isinstance(one, kind)))
        if is_table(field.annotation):
            yield from marked_keys(field.annotation, kind, f"{prefix}{name}.", marks)
        elif marks:
            yield f"{prefix}{name}", marks


def value_of(tables: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401
    """The value of a dotted key in a config's tables. Raises KeyError if it is not there."""
    found: Any = tables
    for part in key.split("."):
        found = found[part]
    return found
