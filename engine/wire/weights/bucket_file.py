"""Buckets as safetensors files, as transport "file" passes them."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.errors import BadInput
from engine.types import JsonObject
from engine.wire.weights.buckets import Bucket, TensorSpec, tensor_view

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
"""safetensors' name of each dtype, by its name on the wire."""

MAX_HEADER = 100 * 2**20
"""Maximum header size in bytes, as in safetensors."""


def write_bucket(path: Path, bucket: Bucket) -> None:
    """Write a bucket. An existing file is overwritten in place, so that its memory or disk space is reused."""
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in bucket.specs:
        end = offset + spec.nbytes
        header[spec.name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8
    path.touch()
    with path.open("r+b", buffering=0) as file:
        _write_all(file, len(text).to_bytes(8, "little") + text)
        for piece in bucket.pieces():
            _write_all(file, piece.cpu().numpy().data)
        file.truncate()


def _write_all(file: Any, data: bytes | memoryview) -> None:  # noqa: ANN401
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file. Other files are refused, because opening a pipe waits for its other end."""
    file = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def _header(path: Path) -> tuple[JsonObject, int]:
    """Return the header, and the byte position of the first tensor."""
    try:
        with open(path, "rb", opener=_open_regular) as file:
            size = int.from_bytes(file.read(8), "little")
            if size > MAX_HEADER:
                raise BadInput(f"{path}: not a safetensors file")
            header = json.loads(file.read(size))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise BadInput(f"{path}: not a complete safetensors file") from None
    if not isinstance(header, dict):
        raise BadInput(f"{path}: not a safetensors file")
    return header, 8 + size


Place = tuple[str, tuple[int, ...], int, int]
"""A tensor's dtype, shape, first byte and end in the file."""


def _place(entry: JsonObject) -> Place:
    begin, end = map(int, entry["data_offsets"])
    if not 0 <= begin <= end:
        raise ValueError(begin)
    return str(entry["dtype"]), tuple(map(int, entry["shape"])), begin, end


class BucketFile:
    """A safetensors file whose tensors are read into a given buffer."""

    def __init__(self, path: Path) -> None:
        """Raises BadInput if the file is missing or truncated."""
        self.path = path
        header, self._start = _header(path)
        try:
            # an open file stays valid if its folder is renamed
            self._file = open(path, "rb", buffering=0, opener=_open_regular)  # noqa: SIM115
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
        header.pop("__metadata__", None)
        try:
            self._places = {name: _place(entry) for name, entry in header.items()}
            self.nbytes = max((end for *_, end in self._places.values()), default=0)
            whole = path.stat().st_size >= self._start + self.nbytes
        except (KeyError, TypeError, ValueError, AttributeError):
            raise BadInput(f"{path}: not a safetensors file") from None
        if not whole:
            raise BadInput(f"{path}: not a complete safetensors file: it is cut off")

    @property
    def names(self) -> frozenset[str]:
        """The names of its tensors."""
        return frozenset(self._places)

    def read_tensors(self, buffer: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Read the file once into a uint8 buffer of at least `nbytes` on the host. Returns views of the buffer.

        Raises BadInput if the file has another dtype or shape than `specs`, or has since been truncated.
        """
        left = buffer.numpy().data[: self.nbytes]
        try:
            with self._file as file:
                file.seek(self._start)
                while left and (count := file.readinto(left)):
                    left = left[count:]
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be read: {error.strerror}") from None
        if left:
            raise BadInput(f"{self.path}: not a complete safetensors file: it is cut off")
        return [self._tensor(buffer, spec) for spec in specs]

    def _tensor(self, buffer: Tensor, spec: TensorSpec) -> Tensor:
        dtype, shape, begin, end = self._places[spec.name]
        if (dtype, shape) != (DTYPES[spec.dtype], spec.shape) or end - begin != spec.nbytes:
            raise BadInput(
                f"{self.path}: {spec.name} is {dtype} {list(shape)}, but "
                f"{DTYPES[spec.dtype]} {list(spec.shape)} was announced"
            )
        return tensor_view(buffer[begin:end], spec)
