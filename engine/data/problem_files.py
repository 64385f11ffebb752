"""Reads the files of a problem set, on this machine or on s3://, and their rows: JSON, JSON lines, Parquet.

Files are parsed here and not by `datasets`, because an error must name its line, and a column may mix numbers and
texts.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from engine.config.recipe import find_file
from engine.errors import BadInput
from engine.run.s3 import SCHEME, open_s3, s3_errors
from engine.types import JsonObject

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".json", ".jsonl", ".parquet")
"""Suffixes of readable files, in upper or lower case."""

BYTES = "unreadable bytes"
"""Key of the object that replaces bytes (a picture, a sound) in a row; its value is their number."""


class JsonNumber(float):
    """A number of a JSON file, with the text by which the file spells it."""

    def __init__(self, literal: str) -> None:
        self.literal = literal


class _Twice(dict[str, Any]):
    """An object of a JSON file in which a key occurs twice."""

    key = ""


@dataclass(frozen=True)
class File:
    """A file and its contents."""

    name: str
    """Its path or address. Every message about the file begins with it."""
    content: bytes


def read_files(path: str) -> list[File]:
    """The file at a path, or the files of a folder and its subfolders, sorted by path. Hidden files, and folders whose
    name begins with "." or "_", are left out. A relative path is looked up as in `recipe.find_file`.

    `path` may also be an s3:// address, with endpoint and credentials in the AWS_* variables. Raises BadInput for a
    missing file or an unknown suffix.
    """
    if path.startswith(SCHEME):
        return _s3_files(path)
    if "://" in path:
        raise BadInput(
            f"problem set {path}: can't read from {path.partition('://')[0]}://; expected a file, a folder, "
            "s3://bucket/path or a dataset of the Hugging Face hub such as owner/name"
        )
    return [File(str(file), file.read_bytes()) for file in _local(path)]


def parse_file(file: File) -> list[tuple[str, JsonObject]]:
    """(where, columns) for each row. `where` is "row 3" or "line 3", counted from 1. Raises BadInput naming file and
    line."""
    if file.name.lower().endswith(".parquet"):
        rows: list[tuple[str, Any]] = _numbered(_parquet(file))
    else:
        text = _text(file)
        rows = _numbered(_parse(file, text, 1)) if text.lstrip()[:1] == "[" else _lines(file, text)
    for where, row in rows:
        if not isinstance(row, dict):
            raise BadInput(f"{file.name}, {where}: expected an object with problem and answer, found {json_kind(row)}")
        if isinstance(row, _Twice):
            raise BadInput(f"{file.name}, {where}: column {row.key} occurs twice; expected each column once")
    return rows


def has_suffix(name: str) -> bool:
    """Whether a file of this name can be read."""
    return name.lower().endswith(SUFFIXES)


def spell_value(value: object) -> str:
    """A value of a row as text. Finite numbers have no exponent: 1e-05 is "0.00001"."""
    if isinstance(value, float):
        return format(Decimal(value.literal if isinstance(value, JsonNumber) else repr(float(value))), "f")
    return str(value)


def json_kind(value: object) -> str:
    """The type of a value, by its name in JSON."""
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, dict) and value.keys() == {BYTES}:
        return "bytes"
    names = {dict: "an object", list: "an array", str: "a text", int: "a number", float: "a number"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "null")


def table_rows(table: pyarrow.Table) -> list[JsonObject]:
    """The rows of a table with the types of JSON, so that they are the same in every file format.

    A number of 16 or 32 bits becomes the shortest decimal that represents it (0.1, not 0.10000000149). Decimals, dates
    and the like become texts; bytes become an object with their number (`BYTES`).
    """
    import pyarrow.types

    for place, field in enumerate(table.schema):
        if pyarrow.types.is_float16(field.type) or pyarrow.types.is_float32(field.type):
            narrow = field.type.to_pandas_dtype()
            values = [None if value is None else float(str(narrow(value))) for value in table[place].to_pylist()]
            table = table.set_column(place, field.name, pyarrow.array(values, pyarrow.float64()))
    return [dict(json.loads(json.dumps(row, default=_as_json))) for row in table.to_pylist()]


def _as_json(value: object) -> object:
    if isinstance(value, bytes):
        return {BYTES: len(value)}
    return format(value, "f") if isinstance(value, Decimal) else str(value)


def _local(path: str) -> list[Path]:
    found = find_file(path)
    if found.is_dir():
        return [found / name for name in _in_folder(str(found), _walk(found))]
    if not found.is_file():
        raise BadInput(f"problem set {path}: no such file or folder")
    _check_suffix(str(found))
    return [found]


def _walk(folder: Path) -> Iterable[str]:
    """The files in a folder and its subfolders, relative to it. A folder that is reached twice through links is read
    once."""
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (str((Path(place) / file).relative_to(folder)) for file in files)


def _s3_files(path: str) -> list[File]:
    with s3_errors(f"problem set {path}"):
        store = open_s3()
        if store.isfile(path):
            _check_suffix(path)
            return [File(path, _s3_file(store, path))]
        folder = path.rstrip("/") + "/"
        names = [(SCHEME + str(name)).removeprefix(folder) for name in store.find(path)]
        if not names:
            raise FileNotFoundError
        return [File(folder + name, _s3_file(store, folder + name)) for name in _in_folder(path, names)]


def _s3_file(store: Any, path: str) -> bytes:  # noqa: ANN401
    """A whole file by one request: parts of a large one would be of two files if it is replaced meanwhile."""
    content: bytes = store.cat_file(path, max_concurrency=1)
    return content


def _in_folder(folder: str, names: Iterable[str]) -> list[str]:
    """The names, relative to the folder, that are files of the problem set, sorted."""
    files = sorted(name for name in names if has_suffix(name) and not _hidden(PurePosixPath(name)))
    if not files:
        raise BadInput(f"problem set {folder}: the folder has no {', '.join(SUFFIXES)} file")
    return files


def _hidden(path: PurePosixPath) -> bool:
    """Whether the file is private to another program: ._a.json, __MACOSX/a.json, _delta_log/0.json."""
    return path.name.startswith(".") or any(part.startswith((".", "_")) for part in path.parts[:-1])


def _check_suffix(name: str) -> None:
    if not has_suffix(name):
        raise BadInput(
            f"problem set {name}: can't read {Path(name).suffix or 'a file without suffix'}; "
            f"expected {', '.join(SUFFIXES)} or a folder of them"
        )


def _text(file: File) -> str:
    try:
        return file.content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = file.content.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{file.name}, line {line}: not valid UTF-8 ({error.reason})") from None


def _numbered(rows: list[Any]) -> list[tuple[str, Any]]:
    return [(f"row {number}", row) for number, row in enumerate(rows, start=1)]


def _lines(file: File, text: str) -> list[tuple[str, Any]]:
    # Only "\n" ends a line of JSON lines: str.splitlines would also cut at U+2028, which may be inside a text.
    lines = enumerate(text.split("\n"), start=1)
    return [(f"line {number}", _parse(file, line, number)) for number, line in lines if line.strip()]


def _parse(file: File, text: str, line: int) -> Any:  # noqa: ANN401
    """The JSON value of `text`, which starts at `line` of `file`."""
    try:
        return json.loads(text, parse_float=JsonNumber, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise BadInput(
            f"{file.name}, line {line + error.lineno - 1}, column {error.colno}: not valid JSON ({error.msg}); "
            "expected an array of objects, or one object per line"
        ) from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, brackets nested thousands deep
        raise BadInput(f"{file.name}, line {line}: can't be read as JSON ({error})") from None


def _object(pairs: list[tuple[str, Any]]) -> JsonObject:
    found = dict(pairs)
    if len(found) < len(pairs):
        found = _Twice(found)
        found.key = _twice(key for key, _ in pairs)
    return found


def _twice(names: Iterable[str]) -> str:
    """The first name that occurs twice, else ""."""
    return next((name for name, count in Counter(names).items() if count > 1), "")


def _parquet(file: File) -> list[JsonObject]:
    import pyarrow  # imported here, because it takes a third of a second, which JSON files do not need
    import pyarrow.parquet

    try:
        if name := _twice(pyarrow.parquet.read_schema(pyarrow.BufferReader(file.content)).names):
            raise BadInput(f"{file.name}: column {name} occurs twice; expected each column once")
        return table_rows(pyarrow.parquet.read_table(pyarrow.BufferReader(file.content)))
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{file.name}: not a readable Parquet file ({error})") from None
