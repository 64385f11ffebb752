"""The instance's side of a weight sync, shared by the embedded engine and vLLM's workers.

`StagedVersion` holds weights received while the instance still generates with the old ones.

It needs only torch, safetensors and xxhash, since it also runs in vLLM's environment.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from reprlib import repr as repr_short
from types import MappingProxyType

import torch
from torch import Tensor

from engine.errors import BadInput, DeadlineError, MetronomeError, TransferError
from engine.run.process import in_thread
from engine.types import JsonObject
from engine.wire.weights.backends import BACKENDS, use_device
from engine.wire.weights.bucket_file import BucketFile
from engine.wire.weights.buckets import (
    DTYPES,
    TensorSpec,
    bucket_cuts,
    bucket_span,
    bucket_views,
    specs_of,
    tensor_view,
)
from engine.wire.weights.checksum import tensor_checksum
from engine.wire.weights.groups import HOST, BroadcastGroup, join_group
from engine.wire.weights.hf_folder import open_folder

NOTHING = torch.empty(0, dtype=torch.uint8)

Named = tuple[str, Tensor]
Job = Callable[[Tensor], tuple[list[Named], Tensor]]
"""Receives a bucket into the given buffer, or into a newly allocated larger one. Returns the tensors and the buffer
used."""


class StagedVersion:
    """Buckets of one version, received in the background one after the other."""

    def __init__(self, version: int, before: StagedVersion | None) -> None:
        """`before`: the version staged last. Its memory is reused if nothing is still received into it."""
        self.version = version
        self._spare = before.idle() if before is not None else []
        self._buckets: list[Future[tuple[list[Named], Tensor]]] = []

    def add_bucket(self, receive: Job) -> None:
        """Add a bucket. `receive` is called in the background, after the earlier buckets."""
        earlier = self._buckets[-1] if self._buckets else None
        buffer = self._spare.pop(0) if self._spare else NOTHING

        def receive_next() -> tuple[list[Named], Tensor]:
            if earlier is not None and isinstance(error := earlier.exception(), TransferError | DeadlineError):
                raise error  # this bucket is lost, too; after one with wrong content it has been sent all the same
            return receive(buffer)

        self._buckets.append(in_thread("stage-weights", receive_next))

    def tensors(self, timeout_s: float) -> list[Named]:
        """Return all staged tensors once they have been received. Raise the error of a failed bucket, or
        DeadlineError."""
        deadline = time.monotonic() + timeout_s
        found: list[Named] = []
        for number, bucket in enumerate(self._buckets):
            if not wait([bucket], deadline - time.monotonic()).done:
                raise DeadlineError(
                    f"bucket {number} of the staged weight version {self.version} did not arrive within {timeout_s:g} s"
                )
            found += bucket.result()[0]
        return found

    def idle(self) -> list[Tensor]:
        """Return the buffers of this version, or [] while something may still be received into them."""
        if not all(bucket.done() for bucket in self._buckets):
            return []
        return [bucket.result()[1] for bucket in self._buckets if bucket.exception() is None]


OUTPUT = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
PERTURBED = -3.0
"""The self-test multiplies rows of the output layer by this number."""


class Receiver:
    """Receives weights from the trainer and verifies them. Each process that holds a model has one.

    Its methods must not be called concurrently, except `connect` and `close`, which cancel a call in progress.
    """

    def __init__(self, timeout_s: float = 600.0, device: torch.device = HOST) -> None:
        """`timeout_s`: deadline of every wait in seconds, until `connect` sets the run's; `device`: the model's
        device."""
        self._timeout_s = timeout_s
        self._device = device
        self._groups: list[BroadcastGroup] = []
        self._transport = ""
        self._off = threading.Event()
        self._joining = threading.Lock()
        self._buffers = [NOTHING, NOTHING]
        self._staged: StagedVersion | None = None

    def connect(self, init_info: JsonObject, local_rank: int = 0) -> None:
        """Leave the current groups and join those of the pipeline stages. With an empty `init_info`, join none.

        `local_rank`: number of this process within its instance. Raises BadInput for a malformed init_info,
        TransferError if `close` or a newer `connect` cancels it, DeadlineError.
        """
        transport, stages, rank, world, timeout_s = (
            parse_init(init_info) if init_info else ("", [], 0, 0, self._timeout_s)
        )
        self.close()  # also cancels a connect in progress, which then releases the lock
        with self._joining:
            self._off = threading.Event()
            self._timeout_s = timeout_s
            self._transport = transport
            groups: list[BroadcastGroup] = []
            try:
                for address in stages:
                    groups.append(
                        join_group(
                            address=address,
                            rank=rank + local_rank,
                            world=world,
                            backend=transport,
                            timeout_s=timeout_s,
                            off=self._off,
                            device=self._device,
                        )
                    )
            except MetronomeError:
                _leave_groups(groups)
                raise
            self._groups = groups

    def receive(self, update_info: JsonObject, base: Path | None = None) -> Iterator[Named]:
        """Yield the tensors that `update_info` names, by its transport.

        "staged": all staged buckets of a version. "base": the model folder `base`, without checksums. Any other: one
        bucket, which is verified completely before its first tensor is yielded. The tensors are valid until the next
        call: copy them.

        Raises BadInput (a malformed update_info; a tensor that differs from what was announced, by name), TransferError
        and DeadlineError.
        """
        transport = update_info.get("transport")
        if transport == "base":
            yield from _base_tensors(base, _perturbed_rows(update_info))
        elif transport == "staged":
            yield from self._staged_version(update_info).tensors(self._timeout_s)
        else:
            yield from self.fetch(update_info)()

    def fetch(self, update_info: JsonObject, places: Mapping[str, Tensor] | None = None) -> Callable[[], list[Named]]:
        """Receive a bucket's bytes. Return a function that verifies them and returns the tensors. Raises the same
        errors as `receive`.

        `places`: tensors by name; broadcast tensors that fit are received directly into them. The others are received
        into two alternating buffers, so that the next bucket may be fetched while this one is verified and loaded.
        """
        # remove the buffer from the list: a cancelled transfer may still write into it
        buffer = self._buffers[0]
        self._buffers = [self._buffers[1], NOTHING]
        specs, tensors, buffer = self._receive_bytes(update_info, buffer, places=places or {})
        self._buffers[1] = buffer
        return lambda: _verified(specs, tensors, update_info["checksum"])

    def stage(self, update_info: JsonObject) -> None:
        """Begin to receive a bucket in the background, into separate host memory.

        `receive` with transport "staged" yields its tensors later, or raises its error. Raises BadInput for a malformed
        update_info.
        """
        version = _parse_version(update_info)
        self._check_bucket(update_info)
        if self._staged is None or self._staged.version != version:
            self._staged = StagedVersion(version, self._staged)
        # open the file now: by the time it is read, its version may be complete and its folder renamed
        file = _open_or_error(Path(update_info["path"])) if update_info["transport"] == "file" else None
        self._staged.add_bucket(lambda buffer: self._receive_to_host(update_info, buffer, file))

    def close(self) -> None:
        """Leave all groups and drop the staged buckets. Calls that wait in a group raise TransferError."""
        self._off.set()
        groups = self._groups
        self._groups = []
        self._staged = None
        _leave_groups(groups)

    def check(self, update_info: JsonObject) -> None:
        """Raise BadInput if `receive` would refuse this update_info before it receives a byte."""
        transport = update_info.get("transport")
        if transport == "base":
            _perturbed_rows(update_info)
        elif transport == "staged":
            self._staged_version(update_info)
        else:
            self._check_bucket(update_info)

    def _staged_version(self, update_info: JsonObject) -> StagedVersion:
        version = _parse_version(update_info)
        if self._staged is None or self._staged.version != version:
            raise BadInput(f"no weights of version {version} were staged")
        return self._staged

    def _check_bucket(self, update_info: JsonObject) -> list[TensorSpec]:
        """Return the bucket's tensors. Raise BadInput if they or their checksum are malformed, or if the transport or
        its group is unknown."""
        transport = update_info.get("transport")
        specs = specs_of(update_info)
        if not isinstance(checksum := update_info.get("checksum"), str):
            raise BadInput(f"update_info.checksum {repr_short(checksum)}; expected hexadecimal digits")
        if transport == "file":
            if not isinstance(update_info.get("path"), str):
                raise BadInput("update_info.path: transport file needs the path of the bucket's safetensors file")
        elif isinstance(transport, str) and transport in BACKENDS:
            self._stage_group(update_info)
        else:
            raise BadInput(
                f"update_info.transport {repr_short(transport)}; known are base, staged, file, {', '.join(BACKENDS)}"
            )
        return specs

    def _stage_group(self, update_info: JsonObject) -> BroadcastGroup:
        transport = update_info["transport"]
        stage = update_info.get("stage")
        groups = self._groups
        if transport != self._transport or not groups:
            raise BadInput(
                f"update_info.transport {repr_short(transport)}, but no groups of this transport were joined; "
                "send /init_weight_transfer_engine first"
            )
        if type(stage) is not int or not 0 <= stage < len(groups):
            raise BadInput(f"update_info.stage {repr_short(stage)}; groups of {len(groups)} stages were joined")
        return groups[stage]

    def _receive_to_host(
        self, update_info: JsonObject, buffer: Tensor, file: BucketFile | BadInput | None
    ) -> tuple[list[Named], Tensor]:
        """Return a bucket's verified tensors in host memory, and the buffer that holds them: the given buffer if it is
        large enough."""
        specs, tensors, room = self._receive_bytes(update_info, buffer, file)
        found = _verified(specs, tensors, update_info["checksum"])
        if room.device == HOST:
            return found, room
        # nccl and hccl receive on the device, which has no room for a second model: copy the tensors to the
        # host, so that torch can reuse the device memory for the next bucket
        buffer = _sized_buffer(buffer, bucket_span(specs), HOST)
        for place, (_, tensor) in zip(held := bucket_views(buffer, specs), found, strict=True):
            place.copy_(tensor)
        return list(zip((spec.name for spec in specs), held, strict=True)), buffer

    def _receive_bytes(
        self,
        update_info: JsonObject,
        buffer: Tensor,
        file: BucketFile | BadInput | None = None,
        places: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> tuple[list[TensorSpec], list[Tensor], Tensor]:
        """Return an unverified bucket: specs, tensors, and the buffer used. `file`: its file if it
        is already open, or the error of opening it."""
        specs = self._check_bucket(update_info)
        if update_info["transport"] == "file":
            file = file or BucketFile(Path(update_info["path"]))
            if isinstance(file, BadInput):
                raise file
            _check_names(file, specs)
            buffer = _sized_buffer(buffer, file.nbytes, HOST)
            return specs, file.read_tensors(buffer, specs), buffer
        group = self._stage_group(update_info)
        use_device(self._device)
        into = {spec.name: places[spec.name] for spec in specs if _fits(places.get(spec.name), spec, group.device)}
        others = [spec for spec in specs if spec.name not in into]
        buffer = _sized_buffer(buffer, bucket_span(others), group.device)
        rooms = dict(zip((spec.name for spec in others), bucket_cuts(buffer, others), strict=True))
        pieces = {name: place.view(-1).view(torch.uint8) for name, place in into.items()} | rooms
        group.broadcast(*(pieces[spec.name] for spec in specs)).wait()
        tensors = [into[spec.name] if spec.name in into else tensor_view(rooms[spec.name], spec) for spec in specs]
        return specs, tensors, buffer


def _fits(place: Tensor | None, spec: TensorSpec, device: torch.device) -> bool:
    """Whether a tensor's bytes can be received into `place`."""
    return (
        place is not None
        and place.shape == spec.shape
        and place.dtype == DTYPES[spec.dtype]
        and place.is_contiguous()
        and place.device == device
    )


def _leave_groups(groups: Sequence[BroadcastGroup]) -> None:
    for group in groups:
        group.close()


def parse_init(info: JsonObject) -> tuple[str, list[dict[str, object]], int, int, float]:
    """Return transport, stage addresses, rank, world size and timeout of an init_info. Raise BadInput if it is
    malformed."""
    transport = info.get("transport")
    stages = info.get("stages")
    rank = info.get("rank")
    world = info.get("world_size")
    timeout_s = info.get("timeout_s")
    if not isinstance(transport, str) or transport not in BACKENDS:
        raise BadInput(f"init_info.transport {repr_short(transport)}; expected one of {', '.join(BACKENDS)}")
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        raise BadInput('init_info.stages must be a list of {"host": ..., "port": ...}, one for each pipeline stage')
    if not (isinstance(rank, int) and isinstance(world, int) and 0 < rank < world):
        raise BadInput(
            f"init_info: rank {repr_short(rank)} of world_size {repr_short(world)}; expected 0 < rank < world_size"
        )
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < 10**6:
        raise BadInput(f"init_info.timeout_s {repr_short(timeout_s)}; expected seconds above 0")
    return transport, stages, rank, world, float(timeout_s)


def _parse_version(update_info: JsonObject) -> int:
    version = update_info.get("version")
    if type(version) is not int or version < 0:
        raise BadInput(f"update_info.version {repr_short(version)}; expected a weight version, 0 or more")
    return version


def _open_or_error(path: Path) -> BucketFile | BadInput:
    """Return the file, or the error of opening it, which is raised when the bucket is received."""
    try:
        return BucketFile(path)
    except BadInput as error:
        return error


def _check_names(file: BucketFile, specs: Sequence[TensorSpec]) -> None:
    expected = {spec.name for spec in specs}
    if file.names != expected:
        differs = min(file.names ^ expected)
        raise BadInput(f"{file.path}: its tensors differ from those announced; the first that differs is {differs}")


def _sized_buffer(buffer: Tensor, nbytes: int, device: torch.device) -> Tensor:
    if len(buffer) >= nbytes and buffer.device == device:
        return buffer
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError:
        raise BadInput(f"update_info: no memory for a bucket of {nbytes} bytes") from None


def _verified(specs: Sequence[TensorSpec], tensors: Sequence[Tensor], checksum: str) -> list[Named]:
    if (found := tensor_checksum(*tensors)) != checksum:
        raise BadInput(
            f"the bucket {specs[0].name} … {specs[-1].name} was corrupted in transit: its checksum is {found}, but the "
            f"announced one is {repr_short(checksum)}"
        )
    return [(spec.name, tensor) for spec, tensor in zip(specs, tensors, strict=True)]


def _perturbed_rows(update_info: JsonObject) -> list[int]:
    perturb = update_info.get("perturb", [])
    if not isinstance(perturb, list) or any(type(token) is not int or not 0 <= token < 2**40 for token in perturb):
        raise BadInput(f"update_info.perturb {repr_short(perturb)}; expected a list of token ids")
    return perturb


def _base_tensors(folder: Path | None, perturb: list[int]) -> Iterator[Named]:
    """Yield the tensors of the folder that the instance was started from. The rows `perturb` of its output layer are
    multiplied by PERTURBED."""
    if folder is None:
        raise BadInput(
            'update_info.transport "base" needs an instance that was started from a folder; this one was not'
        )
    with open_folder(folder) as files:
        changed = {EMBEDDING, OUTPUT} if _ties_embeddings(folder) or OUTPUT not in files.names else {OUTPUT}
        for name in sorted(files.names):
            tensor = files.read_tensor(name)
            if perturb and name in changed:
                if max(perturb) >= len(tensor):
                    raise BadInput(f"update_info.perturb: token {max(perturb)}, but {name} has {len(tensor)} rows")
                tensor = tensor.clone()
                tensor[perturb] *= PERTURBED
            yield name, tensor


def _ties_embeddings(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False))
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"{folder / 'config.json'}: cannot be read: {error!r}") from None
