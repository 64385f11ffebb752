"""Buckets: a few tensors of a pipeline stage at a time, so that the whole model is never in one place.

A tensor that can be sent as it is (contiguous, with the dtype that is sent) is referenced. Other tensors are copied
into a reused buffer. `Bucket.wire` describes a bucket on the wire (the update_info of /update_weights). This module
needs only torch and xxhash, because it also runs in vLLM's environment.
"""

from __future__ import annotations

import itertools
import math
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as repr_short
from typing import Any, TypedDict

import torch
from torch import Tensor

from engine.errors import BadInput, DeadlineError
from engine.wire.weights.checksum import tensor_checksum

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
"""The dtypes that weights can have, by their name on the wire."""

FIRST = 8
"""The first bucket may have one part in so many of the limit: nothing is sent while the sender packs it, and instances
receive it into memory of its own and copy it (WeightLoad.lend_parameters)."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def specs_of(update_info: Mapping[str, object]) -> list[TensorSpec]:
    """Return the tensors of an update_info. Raises BadInput if it does not describe them completely."""
    values = (update_info.get(key) for key in ("names", "dtypes", "shapes"))
    lists = [value for value in values if isinstance(value, list)]
    if len(lists) != 3 or len({len(value) for value in lists}) != 1:
        raise BadInput("update_info needs names, dtypes and shapes: three lists of the same length")
    names, dtypes, shapes = lists
    if not names or len(set(map(str, names))) != len(names):
        raise BadInput("update_info.names must name at least one tensor, and none twice")
    return [_spec(*fields) for fields in zip(names, dtypes, shapes, strict=True)]


def _spec(name: Any, dtype: Any, shape: Any) -> TensorSpec:  # noqa: ANN401
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadInput(
            f"update_info: tensor {repr_short(name)} of dtype {repr_short(dtype)}; expected a name and one of "
            f"{', '.join(DTYPES)}"
        )
    if not isinstance(shape, list) or len(shape) > 8 or any(type(size) is not int or size < 0 for size in shape):
        raise BadInput(f"update_info: {name} has the shape {repr_short(shape)}; expected a list of sizes")
    if math.prod(shape) >= 2**40:
        raise BadInput(f"update_info: {name} of shape {repr_short(shape)} is larger than any tensor")
    return TensorSpec(name, dtype, tuple(shape))


def bucket_span(specs: Sequence[TensorSpec]) -> int:
    """Return the size of a bucket in bytes."""
    return sum(spec.nbytes for spec in specs)


def bucket_views(buffer: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Return the tensors of a bucket as views of the uint8 buffer [≥ span] that has their bytes. A misaligned tensor is
    copied."""
    return [tensor_view(cut, spec) for cut, spec in zip(bucket_cuts(buffer, specs), specs, strict=True)]


def bucket_cuts(buffer: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Return each tensor's uint8 [nbytes] part of the buffer, one after the other."""
    offset = 0
    found = []
    for spec in specs:
        found.append(buffer[offset : offset + spec.nbytes])
        offset += spec.nbytes
    return found


def tensor_view(data: Tensor, spec: TensorSpec) -> Tensor:
    """Return bytes [spec.nbytes] as a tensor of the spec's dtype and shape."""
    dtype = DTYPES[spec.dtype]
    data = data if data.storage_offset() % dtype.itemsize == 0 else data.clone()
    return data.view(dtype).view(spec.shape)


class BucketTensors(TypedDict):
    """The part of update_info that describes a bucket's tensors: three lists of the same length, and the checksum of
    their bytes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    checksum: str


@dataclass
class Bucket:
    """Tensors of one stage, ready to be sent."""

    number: int
    specs: list[TensorSpec]
    tensors: list[Tensor]
    """One tensor per spec, contiguous, with the dtype that is sent."""
    buffer: Tensor
    """uint8 memory of the tensors that had to be copied."""

    def pieces(self) -> list[Tensor]:
        """Return uint8 [nbytes] of each tensor. These are sent one after the other."""
        return [tensor.view(-1).view(torch.uint8) for tensor in self.tensors]

    def wire(self) -> BucketTensors:
        """Return names, dtypes, shapes and checksum, in the form of update_info."""
        return {
            "names": [spec.name for spec in self.specs],
            "dtypes": [spec.dtype for spec in self.specs],
            "shapes": [list(spec.shape) for spec in self.specs],
            "checksum": tensor_checksum(*self.tensors),
        }


class Buffers:
    """Host memory for the buckets being sent. Every buffer that is taken must be given back.

    The memory is kept from sync to sync, because the first access to new memory costs more than the copy.
    """

    def __init__(self, count: int, timeout_s: float, device: torch.device | None = None) -> None:
        """`count`: number of buckets at a time; `timeout_s`: how long `take_buffer` waits until one of them has been
        sent."""
        self._free: queue.Queue[Tensor] = queue.Queue()
        self._timeout_s = timeout_s
        self._device = device or torch.device("cpu")
        for _ in range(count):
            self._free.put(torch.empty(0, dtype=torch.uint8, device=self._device))

    def take_buffer(self, nbytes: int) -> Tensor:
        """Return a uint8 buffer of at least `nbytes` bytes: the smallest free buffer that is large enough, else the
        largest one, enlarged. Raises DeadlineError if no buffer is given back in time."""
        try:
            free = [self._free.get(timeout=self._timeout_s)]
        except queue.Empty:
            raise DeadlineError(f"no bucket of weights was sent in {self._timeout_s:.0f} s") from None
        while not self._free.empty():
            free.append(self._free.get_nowait())
        fitting = [buffer for buffer in free if len(buffer) >= nbytes]
        chosen = min(fitting, key=len) if fitting else max(free, key=len)
        for buffer in free:
            if buffer is not chosen:
                self._free.put(buffer)
        return chosen if len(chosen) >= nbytes else torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Give a buffer back."""
        self._free.put(buffer)


def pack_buckets(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, limit: int, buffers: Buffers
) -> Iterator[Bucket]:
    """Put named tensors into buckets of at most `limit` bytes (the first: limit / FIRST), or of one larger tensor, in
    order; but if the first tensor is too large for the first bucket (an embedding), it comes second. Casts to `dtype`
    if given.

    Tensors that need no copy are referenced, so they must not change while the bucket is in use. The caller gives each
    bucket's buffer back. Raises BadInput for a dtype that weights can't have.
    """
    bucket: Bucket | None = None
    number = used = 0
    for name, tensor in _small_first(tensors, limit // FIRST):
        spec = _spec_of(name, tensor, dtype)
        if bucket is not None and used + spec.nbytes > (limit if bucket.number else limit // FIRST):
            yield bucket
            bucket = None
        if bucket is None:
            bucket = Bucket(number, [], [], buffers.take_buffer(max(limit, spec.nbytes)))
            used = 0
            number = number + 1
        bucket.tensors.append(_ready(tensor, spec, bucket.buffer[used : used + spec.nbytes]))
        bucket.specs.append(spec)
        used += spec.nbytes
    if bucket is not None:
        yield bucket


def _small_first(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in order, but swap the first two if only the second has at most `limit` bytes."""
    left = iter(tensors)
    first = list(itertools.islice(left, 2))
    if len(first) == 2 and first[0][1].nbytes > limit >= first[1][1].nbytes:
        first.reverse()
    yield from first
    yield from left


def _ready(tensor: Tensor, spec: TensorSpec, room: Tensor) -> Tensor:
    """Return the tensor itself if it can be sent without a copy, else a copy in `room`."""
    dtype = DTYPES[spec.dtype]
    if tensor.is_contiguous() and tensor.dtype == dtype and tensor.device == room.device:
        return tensor
    if room.storage_offset() % dtype.itemsize:
        return tensor.to(room.device, dtype).contiguous()
    return room.view(dtype).view(spec.shape).copy_(tensor)


def _spec_of(name: str, tensor: Tensor, dtype: torch.dtype | None) -> TensorSpec:
    dtype = dtype or tensor.dtype
    if dtype not in NAMES:
        raise BadInput(f"{name} is {dtype}; weights travel as one of {', '.join(DTYPES)}")
    return TensorSpec(name, NAMES[dtype], tuple(tensor.shape))
