"""Reads and writes the weights of a Hugging Face folder tensor by tensor, as one safetensors file or several with an
index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import BadInput

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 * 2**30
"""Default size of a written shard. Writing needs this much memory."""

MAPPED_BYTES = 256 * 2**20
"""A shard is reopened after this many bytes have been read. Bytes read through a mapping count as memory until it is
closed."""


class Reader:
    """Reads tensors by name. One shard is open at a time, with about MAPPED_BYTES of it (or one tensor) in memory."""

    def __init__(self, folder: Path, shards: dict[str, Path]) -> None:
        """`shards` maps tensor names to their files; use `open_folder`."""
        self._folder = folder
        self._shards = shards
        self._path: Path | None = None
        self._file: safe_open | None = None
        self._mapped = 0

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors in the folder."""
        return frozenset(self._shards)

    def read(self, name: str) -> Tensor:
        """Return the tensor with this name, with its dtype in the file. It is a view of the mapped file: copy it to
        keep it."""
        if name not in self._shards:
            raise BadInput(f"{self._folder}: tensor {name} is missing in its safetensors")
        path = self._shards[name]
        if self._file is None or self._path != path or self._mapped > MAPPED_BYTES:
            self.close()
            self._file = _open(path)
            self._path = path
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise BadInput(f"{path}: tensor {name} cannot be read: {error}") from None
        self._mapped += tensor.nbytes
        return tensor

    def close(self) -> None:
        """Close the open shard."""
        self._file = None
        self._path = None
        self._mapped = 0


@contextmanager
def open_folder(folder: Path) -> Iterator[Reader]:
    """Yield a reader of the folder's weights. Raises BadInput, which names the missing or damaged file and tensor."""
    reader = Reader(folder, _shards(folder))
    try:
        yield reader
    finally:
        reader.close()


def write_sharded(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write named tensors in order into files of a folder, at most `shard_bytes` (or one tensor) per file.

    One shard is in memory at a time. A single file is named `model.safetensors`. Several files are numbered and have an
    index, which is written last, so a folder without `model.safetensors` and without an index is incomplete. Raises
    BadInput if the folder already has weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if stale := sorted([*folder.glob("*.safetensors"), *folder.glob(INDEX)]):
        raise BadInput(f"{stale[0]}: this folder already has weights; write to another, or delete them first")
    shards: list[list[str]] = []
    total = 0
    for shard in _filled(tensors, shard_bytes):
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        save_file(shard, _partial(folder, len(shards)), metadata={"format": "pt"})
        del shard  # free it before the next one is filled
    _publish(folder, shards, total)


def join_folders(folder: Path, parts: Sequence[Path]) -> None:
    """Join the weights of several folders into one. `write_sharded` wrote each part; no tensor is in two parts.

    Files are moved, not read. The parts are deleted.
    """
    files = [(part, name) for part in parts for name in sorted(path.name for path in part.glob("*.safetensors"))]
    shards: list[list[str]] = []
    total = 0
    for number, (part, name) in enumerate(files, start=1):
        shards.append(list(_open(part / name).keys()))
        total += _payload(part / name)
        (part / name).rename(_partial(folder, number))
    for part in parts:
        shutil.rmtree(part)
    _publish(folder, shards, total)


def _filled(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Group the tensors up to the limit in bytes. Each is copied to separate memory on the host."""
    shard: dict[str, Tensor] = {}
    used = 0
    for name, tensor in tensors:
        if shard and used + tensor.nbytes > limit:
            yield shard
            shard = {}
            used = 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        used += tensor.nbytes
    if shard:
        yield shard


def _payload(path: Path) -> int:
    """Return the size of a file's tensors in bytes. They follow the header, whose length is in the first eight
    bytes."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def _partial(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.partial"


def _publish(folder: Path, shards: list[list[str]], total: int) -> None:
    """Rename the written files to their final names, which include the number of files, and write the index."""
    if len(shards) == 1:
        _partial(folder, 1).rename(folder / SINGLE)
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _partial(folder, number).rename(folder / file)
        where.update(dict.fromkeys(names, file))
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
    partial = folder / f"{INDEX}.partial"
    partial.write_text(index + "\n")
    partial.rename(folder / INDEX)


def _shards(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, found as transformers does: one file, else the index. The index is checked
    against its shards."""
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_open(folder / SINGLE).keys(), folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise BadInput(
            f"{folder}: no {SINGLE} and no {INDEX} there; other weight formats (*.bin and other pickles) are not read"
        )
    where = _index(folder / INDEX)
    for path in dict.fromkeys(where.values()):
        listed = {name for name, file in where.items() if file == path}
        if missing := sorted(listed - set(_open(path).keys())):
            raise BadInput(f"{path}: tensor {missing[0]} is not in it, although {INDEX} says so")
    return where


def _index(path: Path) -> dict[str, Path]:
    try:
        where = json.loads(path.read_text())["weight_map"]
        files = {str(name): str(file) for name, file in where.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f'{path}: not an index of safetensors (an object with "weight_map"): {error!r}') from None
    for name, file in files.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise BadInput(
                f"{path}: tensor {name} is said to be in {file!r}; expected a *.safetensors file in the folder of the "
                "index"
            )
        if not (path.parent / file).is_file():
            raise BadInput(f"{path.parent / file}: no such file, although {INDEX} says it holds tensor {name}")
    return {name: path.parent / file for name, file in files.items()}


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise BadInput(f"{path}: damaged safetensors file: {error}") from None
