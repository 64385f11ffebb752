"""Reads problem sets (a problem, an answer, and any other columns) from JSON, JSON lines or Parquet.

A broken file raises one `BadInput` with file and line. A row that cannot be used is left out and recorded with its
reason and place.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from engine.config.recipe import find_file
from engine.data.hub import is_hub_id, read_hub
from engine.data.problem_files import BYTES, File, JsonNumber, json_kind, parse_file, read_files, spell_value
from engine.data.row_format import (
    ANSWER,
    PROBLEM,
    USUAL,
    RowFields,
    RowFormat,
    column,
    find_fields,
    has_column,
    is_missing,
)
from engine.errors import BadInput, counted
from engine.types import JsonObject

_SHOWN = 80
"""Number of characters of a value that a rejection shows."""


@dataclass(frozen=True)
class ProblemRow:
    """One usable row of a problem set."""

    problem: str
    """The problem's text, unchanged from the file. If it is a conversation: the user's message, or all turns with their
    roles."""
    answer: str
    """The gold answer. A number in the file becomes text without an exponent (5 → "5", 142.0 → "142.0", 1e-05 →
    "0.00001")."""
    columns: Mapping[str, Any]
    """Every column of the row, including problem and answer, with the types of JSON."""
    where: str = field(default="", compare=False)
    """File and row, for messages: "math.json, row 3"; rows and lines count from 1."""
    messages: tuple[JsonObject, ...] = ()
    """The messages of a row whose prompt is a conversation; the last is the user's."""
    part: int = 0
    """The number of the row's set in `data.train`, from 0."""
    shown: str = ""
    """The other columns that the prompt template reads, as JSON; "" if it reads none."""

    @property
    def identity(self) -> str:
        """The text by which two rows have the same problem: the problem itself, or all messages if there are several,
        and the columns that the template reads."""
        several = len(self.messages) > 1
        text = json.dumps(self.messages, ensure_ascii=False, sort_keys=True) if several else self.problem
        return text + self.shown

    def reject(self, column: str, reason: str, found: object, expected: str) -> Rejected:
        """This row, left out. The arguments are the fields of `Rejected`."""
        return Rejected(self.where, column, reason, shorten_value(found), expected)


@dataclass(frozen=True)
class Rejected:
    """A row that was left out."""

    where: str
    """Like `ProblemRow.where`."""
    column: str
    """The wrong column."""
    reason: str
    """The reason by which rejections are counted: "no answer", "duplicate" …"""
    found: str
    """The value that was found, shortened."""
    expected: str
    """The value that is expected."""

    def __str__(self) -> str:
        return f"{self.where}: {self.column}: {self.reason} (found {self.found}; expected {self.expected})"


@dataclass(frozen=True)
class Problems:
    """The usable rows of a problem set, in the order of the file. The files of a folder are sorted by name."""

    rows: tuple[ProblemRow, ...]
    skipped: Mapping[str, int]
    """Reason → number of rows left out for it."""
    source: str
    """The path, the address, or the dataset id with split and commit that was read."""
    content_hash: str
    """SHA-256 (hex) of the file, as `sha256sum` prints it. For a folder it is over the digests of its files sorted by
    name; for a dataset of the hub, over its rows as JSON lines."""
    rejected: tuple[Rejected, ...] = ()
    """The rows that `skipped` counts, in order."""
    notes: tuple[str, ...] = ()
    """How rows were read, where that is not plain from their columns."""


def read_problems(path: str, layout: RowFormat = USUAL) -> Problems:
    """Read a .json (array or lines), .jsonl or .parquet file, or a folder of such files, on this machine or on s3://,
    or a dataset of the hub. `layout`: where its rows have problem and answer.

    Relative paths are looked up as in `recipe.find_file`. Raises BadInput for a missing or malformed file (with its
    line), an unknown suffix, an address that cannot be reached, or a set without a usable row.
    """
    source, raw, content_hash = _raw(path)
    layout = layout.without_missing([columns for _, columns in raw])
    fields = [find_fields(columns, layout) for _, columns in raw]
    rows, rejected = _usable(raw, fields, layout)
    if not rows:
        raise BadInput(f"problem set {path}: no usable row among {len(raw)}{_why(raw, rejected)}")
    remarks = Counter(remark for one in fields for remark in one.remarks)
    return Problems(
        rows=tuple(rows),
        skipped=count_reasons(rejected),
        source=source,
        content_hash=content_hash,
        rejected=tuple(rejected),
        notes=tuple(f"{path}, {counted(count, 'row')}: {remark}" for remark, count in remarks.items()),
    )


def content_hash(path: str) -> str:
    """`Problems.content_hash`, without parsing rows (except for a dataset of the hub)."""
    return _raw(path)[2] if is_hub_id(path) else _hash(read_files(path))


def format_counts(skipped: Mapping[str, int]) -> str:
    """The skips as text: "2 × no answer, 1 × over-long"."""
    return ", ".join(f"{number} × {reason}" for reason, number in sorted(skipped.items()))


def count_reasons(rejected: Iterable[Rejected]) -> dict[str, int]:
    """Reason → number of rejected rows."""
    return dict(Counter(row.reason for row in rejected))


def shorten_value(value: object) -> str:
    """A value of a row as JSON, with numbers as in the file, cut to `_SHOWN` characters."""
    text = value.literal if isinstance(value, JsonNumber) else json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _raw(path: str) -> tuple[str, list[tuple[str, JsonObject]], str]:
    """The source, (place, columns) of every row, and the content hash."""
    if is_hub_id(path):
        source, found = read_hub(path)
        rows = [(f"{path}, {place}", columns) for place, columns in found]
        lines = "".join(json.dumps(columns, sort_keys=True) + "\n" for _, columns in rows)
        return source, rows, hashlib.sha256(lines.encode()).hexdigest()
    files = read_files(path)
    rows = [(f"{file.name}, {place}", columns) for file in files for place, columns in parse_file(file)]
    return (path if "://" in path else str(find_file(path))), rows, _hash(files)


def _hash(files: list[File]) -> str:
    digests = [hashlib.sha256(file.content) for file in files]
    if len(digests) == 1:
        return digests[0].hexdigest()
    return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()


def _usable(
    raw: Sequence[tuple[str, JsonObject]], fields: Sequence[RowFields], layout: RowFormat
) -> tuple[list[ProblemRow], list[Rejected]]:
    rows: list[ProblemRow] = []
    rejected: list[Rejected] = []
    unanswered = layout.own_reward and not any(one.answer_column for one in fields)
    for (where, columns), found in zip(raw, fields, strict=True):
        answer = _any_answer(found.answer, unanswered) if layout.own_reward else found.answer
        fault = _fault(columns, found, answer, unanswered)
        if fault:
            rejected.append(Rejected(where, *fault))
        else:
            plain = json.loads(json.dumps(columns))  # plain floats, which every encoder accepts
            shown = json.dumps([column(plain, name) for name in layout.shown]) if layout.shown else ""
            rows.append(ProblemRow(found.problem, spell_value(answer), plain, where, found.messages, shown=shown))
    return rows, rejected


def _any_answer(value: Any, unanswered: bool) -> Any:  # noqa: ANN401
    """The answer for a user's reward, which also reads objects, lists and truth values, as JSON."""
    if unanswered:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else value


def _fault(
    columns: Mapping[str, Any], found: RowFields, answer: object, unanswered: bool
) -> tuple[str, str, str, str] | None:
    """Why a row cannot be used (column, reason, found, expected); None if it can be used."""
    if found.refused:
        expected = "a message of the user or a tool; a text that continues in a column prompt, an answer in messages"
        shown = shorten_value(column(columns, found.problem_column)[-1])
        return found.problem_column, "conversation ends with the assistant", shown, expected
    for name, place, value, expected in (
        ("problem", found.problem_column, found.problem, "a text"),
        ("answer", found.answer_column or "answer", answer, "a string or a number"),
    ):
        reason = "" if name == "answer" and unanswered else _wrong(name, value)
        if reason:
            if isinstance(column(columns, place), list) and name == "problem":
                expected = "a text, or messages that are texts, one of them the user's"
            names = f"the columns {', '.join(columns) or 'none'}"
            shown = shorten_value(value) if has_column(columns, place) else names
            return place, reason, shown, _EXPECTED.get(reason, expected)
    for name, value in columns.items():
        if _has_bytes(value):
            return name, "bytes", shorten_value(value), "no picture, sound or other bytes: the model reads text only"
    return None


_EXPECTED = {
    "not valid Unicode": "whole characters",
    "answer is not a finite number": "a finite number, or a string",
    "answer is beyond a double": "a number of magnitude 5e-324 to 1.8e308, or a string",
}
"""The expected value by reason, where more than the type matters."""


def _has_bytes(value: object) -> bool:
    if isinstance(value, dict):
        return BYTES in value or any(map(_has_bytes, value.values()))
    return isinstance(value, list) and any(map(_has_bytes, value))


def _wrong(name: str, value: object) -> str:
    if is_missing(value):
        return f"no {name}"
    if isinstance(value, bool) or not isinstance(value, str if name == "problem" else str | int | float):
        return f"{name} is {json_kind(value)}"
    if isinstance(value, JsonNumber) and (math.isinf(value) or (not value and Decimal(value.literal))):
        return f"{name} is beyond a double"
    if isinstance(value, float) and math.isinf(value):
        return f"{name} is not a finite number"
    return "not valid Unicode" if isinstance(value, str) and _lone_surrogate(value) else ""


def _lone_surrogate(text: str) -> bool:
    """Whether the text contains half a character, which JSON can spell ("\\ud800") and no tokenizer accepts."""
    return re.search(r"[\ud800-\udfff]", text) is not None


def _why(raw: list[tuple[str, JsonObject]], rejected: list[Rejected]) -> str:
    expected = (
        f"a problem in one of the columns {', '.join(PROBLEM)} and its answer in one of {', '.join(ANSWER)}, solution, "
        "or the names of others in data.columns.problem and data.columns.answer"
    )
    if not raw:
        return f"; expected rows with {expected}"
    columns = ", ".join(raw[0][1]) or "none"
    skips = format_counts(count_reasons(rejected))
    return f" ({skips}); the first row has the columns {columns}; expected {expected}"
