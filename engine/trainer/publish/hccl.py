"""The sender by vllm-ascend's own weight transfer (transport hccl). Written from its published source, not run on
hardware.

One sender, hence one pipeline stage. The instances' side is vllm-ascend's too: it loads what it receives as it comes,
so the checksums are not compared on the way; the probe after the sync sees what they would have seen.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Any

import torch

from engine.errors import BadInput, DeadlineError, TransferError
from engine.wire.weights.buckets import Bucket
from engine.wire.weights.groups import own_address

PACKED_BYTES = 256 * 2**20
"""Of vllm-ascend's own packing inside a bucket; sender and receivers must agree on it."""


class HcclTransport:
    """HCCLWeightTransferEngine.trainer_init and trainer_send_weights."""

    name = "hccl"
    groups = True

    def __init__(self, timeout_s: float, device: torch.device, stages: int) -> None:
        """Raises BadInput where vllm-ascend is missing and for several stages. `device`:
        the NPU of this rank's model."""
        if stages > 1:
            raise BadInput(f'weights.transport = "hccl" knows one sender, but parallel.pipeline = {stages}; use file')
        try:
            from vllm_ascend.distributed.weight_transfer import hccl_engine
        except ImportError as error:
            raise BadInput(
                f'weights.transport = "hccl" needs vllm-ascend in the trainer\'s environment too: {error}; use file, '
                "or gloo without devices"
            ) from None
        self._engine = hccl_engine
        self.device = device
        self._timeout_s = timeout_s
        self._address: dict[str, str | int] = {}
        self._group: Any = None

    def meet(self, local: bool) -> Mapping[str, str | int]:
        """A port that is free now: vllm-ascend opens it itself."""
        host = own_address(local)
        with socket.create_server((host, 0)) as server:
            self._address = {"host": host, "port": server.getsockname()[1]}
        return self._address

    def gather(self, world: int) -> None:
        """Make the group with the instances' workers."""
        if world > 1:
            where = {"master_address": self._address["host"], "master_port": self._address["port"], "world_size": world}
            self._group = self._engine.HCCLWeightTransferEngine.trainer_init(where)

    def call_off(self) -> None:
        """Drop the group. A broadcast under way can't be called off:
        HCCL's own time-out (HCCL_EXEC_TIMEOUT) ends it."""
        self._group = None

    def write(self, bucket: Bucket, info: Mapping[str, Any]) -> Mapping[str, str | int]:
        """How the tensors are packed."""
        return {"packed": True, "packed_buffer_size_bytes": PACKED_BYTES}

    def send(self, bucket: Bucket) -> Sending:
        """Broadcast the bucket's tensors while the instances receive them."""
        names = [spec.name for spec in bucket.specs]
        tensors = list(zip(names, bucket.tensors, strict=True))
        return Sending(self._engine, self._group, tensors, self._timeout_s)


class Sending:
    """trainer_send_weights in a thread, since it returns when the bytes are through."""

    def __init__(self, engine: Any, group: Any, tensors: list[tuple[str, torch.Tensor]], timeout_s: float) -> None:  # noqa: ANN401
        self._engine = engine
        self._group = group
        self._tensors = tensors
        self._timeout_s = timeout_s
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._run, name="hccl-broadcast", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._group is None:  # no instance
            return
        arguments = self._engine.HCCLTrainerSendWeightsArgs(
            group=self._group, packed=True, packed_buffer_size_bytes=PACKED_BYTES
        )
        try:
            self._engine.HCCLWeightTransferEngine.trainer_send_weights(iter(self._tensors), arguments)
            torch.accelerator.synchronize()
        except RuntimeError as error:
            self._error = error

    def wait(self) -> None:
        """Until the bytes are through. TransferError, DeadlineError."""
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"a bucket of weights was not through within {self._timeout_s:g} s")
        if self._error is not None:
            raise TransferError(f"a member of the weight transfer failed: {self._error}")
