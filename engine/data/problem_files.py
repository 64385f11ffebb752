"""Reads the files of a problem set, on this machine or on s3://, and their rows: JSON, JSON lines, Parquet.

Files are parsed here and not by `datasets`, because an error must name its line, and a column may mix numbers and
texts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.recipe import find
from engine.errors import BadInput
from engine.types import JsonObject

SUFFIXES = (".json", ".jsonl", ".parquet")
"""Suffixes of the files that can be read."""

SCHEME = "s3://"
"""Scheme of addresses on S3."""


@dataclass(frozen=True)
class File:
    """A file and its contents."""

    name: str
    """Its path or address; every message about it begins with this."""
    content: bytes


def read_files(path: str) -> list[File]:
    """The file at a path, or the files of a folder sorted by name. A relative path is looked up as in `recipe.find`.

    `path` may also be an s3:// address; its endpoint and credentials are in the AWS_* variables. Raises BadInput for a
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


def parse(file: File) -> list[tuple[str, JsonObject]]:
    """(where, columns) for each row. `where` is "row 3" or "line 3", counted from 1. Raises BadInput naming file and
    line."""
    if file.name.endswith(".parquet"):
        rows: list[tuple[str, Any]] = _numbered(_parquet(file))
    else:
        text = _text(file)
        rows = _numbered(_parse(file, text, 1)) if text.lstrip()[:1] == "[" else _lines(file, text)
    for where, row in rows:
        if not isinstance(row, dict):
            raise BadInput(f"{file.name}, {where}: expected an object with problem and answer, found {kind(row)}")
    return rows


def kind(value: object) -> str:
    """The type of a value, as JSON names it."""
    if isinstance(value, bool):
        return "a truth value"
    names = {dict: "an object", list: "an array", str: "a text", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def plain(row: JsonObject) -> JsonObject:
    """The row with dates, decimals and bytes as text, so that it is the same in every file format."""
    return dict(json.loads(json.dumps(row, default=str)))


def _local(path: str) -> list[Path]:
    found = find(path)
    if found.is_dir():
        return [
            Path(name) for name in _in_folder(str(found), [str(file) for file in found.iterdir() if file.is_file()])
        ]
    if not found.is_file():
        raise BadInput(f"problem set {path}: no such file or folder")
    _check_suffix(str(found))
    return [found]


def _s3_files(path: str) -> list[File]:
    import botocore.exceptions  # imported here, because it takes seconds, which local files do not need
    import s3fs

    try:
        store = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)  # a file may be new
        if store.isfile(path):
            _check_suffix(path)
            return [File(path, store.cat_file(path))]
        names = _in_folder(path, [SCHEME + str(name) for name in store.ls(path, detail=False)])
        return [File(name, store.cat_file(name)) for name in names]
    except FileNotFoundError:
        raise BadInput(f"problem set {path}: no such file or folder on S3") from None
    except (OSError, botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        raise BadInput(
            f"problem set {path}: S3 cannot be read ({error}); AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY give its address and your credentials"
        ) from None


def _in_folder(folder: str, names: list[str]) -> list[str]:
    files = sorted(name for name in names if name.endswith(SUFFIXES))
    if not files:
        raise BadInput(f"problem set {folder}: the folder has no {', '.join(SUFFIXES)} file")
    return files


def _check_suffix(name: str) -> None:
    if not name.endswith(SUFFIXES):
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
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(
            f"{file.name}, line {line + error.lineno - 1}, column {error.colno}: not valid JSON ({error.msg}); "
            "expected an array of objects, or one object per line"
        ) from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, brackets nested thousands deep
        raise BadInput(f"{file.name}, line {line}: can't be read as JSON ({error})") from None


def _parquet(file: File) -> list[JsonObject]:
    import pyarrow  # imported here, because it takes a third of a second, which JSON files do not need
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(pyarrow.BufferReader(file.content)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{file.name}: not a readable Parquet file ({error})") from None
    return [plain(row) for row in rows]
