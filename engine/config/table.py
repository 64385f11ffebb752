"""The base class of all tables of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

LARGEST = 2**31 - 1
"""The largest integer of a key, but for seeds: token ids, positions and sizes of tensors are int32 somewhere."""
NAME = "NAME"
"""Stands for the name that a recipe gives a table, as in [stages.NAME]."""


class Table(BaseModel):
    """Base of all tables. Unknown keys, infinity, NaN and integers above LARGEST are errors; values do not change after
    loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, int) and value > LARGEST and info.field_name != "seed":
            raise PydanticKnownError("less_than_equal", {"le": LARGEST})
        return value


def is_table(annotation: Any) -> TypeGuard[type[Table]]:  # noqa: ANN401
    """Whether a key of this annotation is a table of further keys."""
    return isinstance(annotation, type) and issubclass(annotation, Table)


def named_table(annotation: Any) -> type[Table] | None:  # noqa: ANN401
    """The class of the tables in a key of this annotation, if the recipe names them (`dict[str, Table]`); else None."""
    inner = get_args(annotation)[1] if get_origin(annotation) is dict else None
    return inner if is_table(inner) else None


def tables_in(table: type[Table], prefix: str = "") -> Iterator[tuple[str, type[Table]]]:
    """(dotted name, class) of all tables inside a table, to any depth. A table that the recipe names is `NAME`."""
    for key, field in table.model_fields.items():
        inner = field.annotation
        name = f"{prefix}{key}"
        if named := named_table(inner):
            inner, name = named, f"{name}.{NAME}"
        if is_table(inner):
            yield name, inner
            yield from tables_in(inner, f"{name}.")


def is_value(annotation: Any) -> bool:  # noqa: ANN401
    """Whether a key of this annotation has a value rather than further keys."""
    return not is_table(annotation) and named_table(annotation) is None


def keys_in(table: type[Table]) -> Iterator[str]:
    """The dotted names of all keys inside a table that have a value, to any depth; `NAME` as in `tables_in`."""
    for name, inner in tables_in(table):
        yield from (f"{name}.{key}" for key, field in inner.model_fields.items() if is_value(field.annotation))
