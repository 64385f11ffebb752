"""Reading problem sets: DeepScaleR's schema (problem, answer, anything else) from JSON, JSON lines or Parquet.

A broken file is one `BadInput` with file and line; a row that can't be used is skipped and counted with its reason.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import BadInput
from engine.recipe import find

SUFFIXES = (".json", ".jsonl", ".parquet")
"""What can be read."""


@dataclass(frozen=True)
class Row:
    """One usable row of a problem set."""

    problem: str
    """As it stands in the file."""
    answer: str
    """The gold answer; a number in the file is its text here (5 → "5", 142.0 → "142.0")."""
    columns: Mapping[str, Any]
    """Every column of the row, problem and answer included, with the types of JSON."""


@dataclass(frozen=True)
class Problems:
    """The usable rows of a problem set, in the order of the file (of the files sorted by name, for a folder)."""

    rows: tuple[Row, ...]
    skipped: Mapping[str, int]
    """Reason → number of rows left out for it."""
    source: str
    """The path that was read."""
    content_hash: str
    """SHA-256 (hex) of the file as `sha256sum` prints it; of a folder, of its files' digests sorted by name."""


def read_problems(path: str) -> Problems:
    """Read a .json (array or lines), .jsonl or .parquet file, or a folder of them; relative paths as `recipe.find`.

    Raises BadInput for a missing or malformed file (with its line), an unknown suffix, or a file without a usable row.
    """
    if "://" in path:
        raise BadInput(f"problem set {path}: only local files can be read; copy it to this machine and give its path")
    files = _files(path)
    contents = [file.read_bytes() for file in files]
    raw = [row for file, content in zip(files, contents, strict=True) for row in _read(file, content)]
    rows, skipped = _usable(raw)
    if not rows:
        raise BadInput(f"problem set {path}: no usable row among {len(raw)}{_why(raw, skipped)}")
    return Problems(tuple(rows), dict(skipped), str(find(path)), _hash(contents))


def counts(skipped: Mapping[str, int]) -> str:
    """The skips for people: "2 × no answer, 1 × over-long"."""
    return ", ".join(f"{number} × {reason}" for reason, number in sorted(skipped.items()))


def _files(path: str) -> list[Path]:
    found = find(path)
    if found.is_dir():
        files = sorted(file for file in found.iterdir() if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise BadInput(f"problem set {found}: the folder holds no {', '.join(SUFFIXES)} file")
        return files
    if not found.is_file():
        raise BadInput(f"problem set {path}: no such file or folder")
    if found.suffix not in SUFFIXES:
        raise BadInput(f"problem set {found}: can't read {found.suffix or 'a file without suffix'}; "
                       f"expected {', '.join(SUFFIXES)} or a folder of them")
    return [found]


def _hash(contents: list[bytes]) -> str:
    digests = [hashlib.sha256(content) for content in contents]
    if len(digests) == 1:
        return digests[0].hexdigest()
    return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()


def _read(file: Path, content: bytes) -> list[dict[str, Any]]:
    if file.suffix == ".parquet":
        return _read_parquet(file, content)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{file}, line {line}: not valid UTF-8 ({error.reason})") from None
    rows = _array(file, text) if text.lstrip()[:1] == "[" else _lines(file, text)
    for where, row in rows:
        if not isinstance(row, dict):
            raise BadInput(f"{file}, {where}: expected an object with problem and answer, found {_kind(row)}")
    return [row for _, row in rows]


def _array(file: Path, text: str) -> list[tuple[str, Any]]:
    return [(f"row {number}", row) for number, row in enumerate(_parse(file, text, 1), start=1)]


def _lines(file: Path, text: str) -> list[tuple[str, Any]]:
    # Only "\n" ends a line of JSON lines: str.splitlines would also cut at U+2028, which may stand inside a text.
    lines = enumerate(text.split("\n"), start=1)
    return [(f"line {number}", _parse(file, line, number)) for number, line in lines if line.strip()]


def _parse(file: Path, text: str, line: int) -> Any:  # noqa: ANN401
    """The JSON value of `text`, which starts at `line` of `file`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"{file}, line {line + error.lineno - 1}, column {error.colno}: not valid JSON ({error.msg}); "
                       "expected an array of objects, or one object per line") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, brackets nested thousands deep
        raise BadInput(f"{file}, line {line}: can't be read as JSON ({error})") from None


def _read_parquet(file: Path, content: bytes) -> list[dict[str, Any]]:
    import pyarrow  # here, not above: it takes a third of a second that a JSON file need not wait for
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(pyarrow.BufferReader(content)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{file}: not a readable Parquet file ({error})") from None
    # Dates, decimals and bytes become text, so that a row means the same whatever file it came from.
    return [json.loads(json.dumps(row, default=str)) for row in rows]


def _usable(raw: Iterable[dict[str, Any]]) -> tuple[list[Row], Counter[str]]:
    rows: list[Row] = []
    skipped: Counter[str] = Counter()
    for columns in raw:
        reason = _unusable(columns)
        if reason:
            skipped[reason] += 1
        else:
            rows.append(Row(columns["problem"], str(columns["answer"]), columns))
    return rows, skipped


def _unusable(columns: Mapping[str, Any]) -> str:
    """Why a row can't be used; empty if it can."""
    problem, answer = columns.get("problem"), columns.get("answer")
    if _missing(problem):
        return "no problem"
    if _missing(answer):
        return "no answer"
    if not isinstance(problem, str):
        return f"problem is {_kind(problem)}"
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"answer is {_kind(answer)}"
    if _lone_surrogate(problem) or _lone_surrogate(str(answer)):
        return "not valid Unicode"
    return ""


def _missing(value: object) -> bool:
    if isinstance(value, float):
        return math.isnan(value)  # NaN is how data frames write null
    return value is None or (isinstance(value, str) and not value.strip())


def _lone_surrogate(text: str) -> bool:
    """JSON can spell half a character ("\\ud800"), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _kind(value: object) -> str:
    """What JSON calls the type of a value."""
    if isinstance(value, bool):
        return "a truth value"
    names = {dict: "an object", list: "an array", str: "a text", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _why(raw: list[dict[str, Any]], skipped: Mapping[str, int]) -> str:
    if not raw:
        return "; expected rows with the columns problem and answer"
    columns = ", ".join(raw[0]) or "none"
    return f" ({counts(skipped)}); expected the columns problem and answer, the first row has {columns}"
