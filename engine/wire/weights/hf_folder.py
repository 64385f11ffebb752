"""The weights of a Hugging Face folder: read and written tensor by tensor,
in one safetensors file or many with an index."""

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
"""Default size of a written shard: what writing holds in memory."""

MAPPED_BYTES = 256 * 2**20
"""How much of a shard is read before it is opened anew:
what was read through a mapping counts as memory until it closes."""


class Reader:
    """Looks tensors up by name. One shard is open at a time,
    and memory holds about MAPPED_BYTES of it (or one tensor)."""

    def __init__(self, folder: Path, shards: dict[str, Path]) -> None:
        """`shards` maps tensor names to their files; use `open_folder`."""
        self._folder = folder
        self._shards = shards
        self._path: Path | None = None
        self._file: safe_open | None = None
        self._mapped = 0

    @property
    def names(self) -> frozenset[str]:
        """All tensors of the folder."""
        return frozenset(self._shards)

    def read(self, name: str) -> Tensor:
        """The tensor of that name in its file's dtype, a view of the mapped file: copy it to keep it."""
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
        """Let go of the open shard."""
        self._file = None
        self._path = None
        self._mapped = 0


@contextmanager
def open_folder(folder: Path) -> Iterator[Reader]:
    """A reader of the folder's weights. Raises BadInput naming the file (and tensor) that is missing or damaged."""
    reader = Reader(folder, _shards(folder))
    try:
        yield reader
    finally:
        reader.close()


def write_sharded(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write named tensors into a folder as they come, at most `shard_bytes` (or one tensor) to a file.

    Holds one shard in memory. One file is `model.safetensors`; more are numbered and have an index, which is written
    last: a folder without `model.safetensors` and index is not complete. Raises BadInput where weights lie already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if stale := sorted([*folder.glob("*.safetensors"), *folder.glob(INDEX)]):
        raise BadInput(f"{stale[0]}: there are weights in this folder already; write to another, or delete them first")
    shards: list[list[str]] = []
    total = 0
    for shard in _filled(tensors, shard_bytes):
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        save_file(shard, _partial(folder, len(shards)), metadata={"format": "pt"})
        del shard  # before the next is filled
    _publish(folder, shards, total)


def join(folder: Path, parts: Sequence[Path]) -> None:
    """Make one folder's weights of those of several (each from `write_sharded`, no tensor in two); the parts go away.

    Files are moved, not read.
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
    """Group the tensors up to the limit in bytes; each on the host and apart from the memory it came from."""
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
    """Bytes of a file's tensors: what comes after the header, whose length the first eight bytes give."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def _partial(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.partial"


def _publish(folder: Path, shards: list[list[str]], total: int) -> None:
    """Give the written files their names, which hold the number of all."""
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
    """The file of each tensor, as transformers looks for it: one file, else the index, checked against its shards."""
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
                f"{path}: tensor {name} is said to be in {file!r}; expected a *.safetensors beside the index"
            )
        if not (path.parent / file).is_file():
            raise BadInput(f"{path.parent / file}: no such file, although {INDEX} says it holds tensor {name}")
    return {name: path.parent / file for name, file in files.items()}


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise BadInput(f"{path}: damaged safetensors file: {error}") from None
