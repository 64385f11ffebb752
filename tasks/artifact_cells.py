"""Formats values for the tables of Prefect's artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_cell(value: Any) -> str:  # noqa: ANN401
    """A value as text: integers and large numbers have thousands separators, other numbers four significant digits."""
    if value is None or value == {} or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {format_cell(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(format_cell, value))
    return str(value)


def table_rows(values: Mapping[str, Any]) -> list[dict[str, str]]:
    """The rows of a table artifact with two columns. Names lose their underscores."""
    return [{"figure": name.replace("_", " "), "value": format_cell(value)} for name, value in values.items()]


def table_as_markdown(values: Mapping[str, Any]) -> str:
    """The same table in Markdown."""
    rows = (f"| {row['figure']} | {row['value'].replace('|', chr(92) + '|')} |" for row in table_rows(values))
    return "\n".join(["| | |", "|---|---|", *rows])
