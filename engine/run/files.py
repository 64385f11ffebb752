"""Atomic writes of files, and files of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: it is complete or absent."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)


def append_line(path: Path, row: Mapping[str, object]) -> None:
    """Append one JSON object as a line, in one write. On a full disk (OSError) the file is unchanged."""
    data = (json.dumps(row) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise


def read_lines(path: Path) -> Iterator[Any]:
    """The JSON objects in a file of lines; their readers know the keys. A last line that a kill has cut off is left
    out."""
    if path.exists():
        for line in path.read_text().split("\n")[:-1]:
            yield json.loads(line)
