"""What all tables of the configuration have in common."""

from __future__ import annotations

from typing import Any, TypeGuard

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """Base of all tables: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def is_table(annotation: Any) -> TypeGuard[type[Table]]:  # noqa: ANN401
    """Whether a key of this annotation is a table of further keys."""
    return isinstance(annotation, type) and issubclass(annotation, Table)
