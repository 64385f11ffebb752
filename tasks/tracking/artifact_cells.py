"""Formats values and tables for the Markdown of Prefect's artifacts and of MLflow's descriptions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import clean_line

HASH = re.compile("[0-9a-f]{40,}")


def format_cell(value: Any) -> str:  # noqa: ANN401
    """A value as text: integers and large numbers have thousands separators, other numbers four significant digits. A
    hash is cut to its first digits."""
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
    return f"{value[:12]}…" if isinstance(value, str) and HASH.fullmatch(value) else str(value)


def table_rows(values: Mapping[str, Any]) -> list[dict[str, str]]:
    """The rows of a table artifact with two columns. Names lose their underscores."""
    return [{"figure": name.replace("_", " "), "value": format_cell(value)} for name, value in values.items()]


def table_as_markdown(values: Mapping[str, Any]) -> str:
    """The same table in Markdown."""
    return markdown_table(["", ""], [[row["figure"], row["value"]] for row in table_rows(values)])


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown of plain texts."""
    lines = ["".join(map(_cell, line)) + "|" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _cell(value: object) -> str:
    text = markdown_text(str(value))
    return f"| {text} " if text else "| "


def markdown_text(text: str) -> str:
    """One line that Markdown shows as it is: no code, link or HTML begins in it, and no cell of a table ends."""
    return re.sub(r"([\\`<|]|(?<=\])\()", r"\\\1", clean_line(text))


def code_span(text: str) -> str:
    """One line as code of Markdown, also with backticks in it."""
    text = clean_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"
