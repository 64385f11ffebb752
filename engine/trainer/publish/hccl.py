"""The sender for vllm-ascend's own weight transfer (transport hccl). Written from its published source, not run on
hardware.

It knows one sender, so one pipeline stage. The instances receive by vllm-ascend too, which loads each tensor when it
arrives: checksums are not compared. The probe after the sync finds what they would have found.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import torch

from engine.errors import BadInput, DeadlineError, TransferError
from engine.wire.messages import BucketInfo, MeetingPlace
from engine.wire.weights.buckets import Bucket
from engine.wire.weights.groups import own_address

PACKED_BYTES = 256 * 2**20
"""Size of the pieces into which vllm-ascend packs a bucket. Sender and receivers must use the same."""


class HcclTransport:
    """Sends by `trainer_init` and `trainer_send_weights` of vllm-ascend's HCCLWeightTransferEngine."""

    name = "hccl"
    groups = True

    def __init__(self, timeout_s: float, device: torch.device, stages: int) -> None:
        """`device`: the NPU of this rank's model. Raises BadInput without vllm-ascend, and for several stages."""
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
        self._meeting: MeetingPlace | None = None
        self._group: Any = None

    def meet(self, local: bool) -> MeetingPlace:
        """Return a port that is free now. vllm-ascend opens it later."""
        host = own_address(local)
        with socket.create_server((host, 0)) as server:
            self._meeting = MeetingPlace(host, server.getsockname()[1])
        return self._meeting

    def gather(self, world: int) -> None:
        """Make the group with the instances' workers."""
        if world > 1:
            assert self._meeting is not None, "`meet` comes first"
            where = {"master_address": self._meeting.host, "master_port": self._meeting.port, "world_size": world}
            self._group = self._engine.HCCLWeightTransferEngine.trainer_init(where)

    def call_off(self) -> None:
        """Drop the group. A broadcast under way goes on until HCCL's own time limit (HCCL_EXEC_TIMEOUT)."""
        self._group = None

    def write(self, bucket: Bucket, info: BucketInfo) -> None:
        """Add to `info` how the tensors are packed."""
        info.packed = True
        info.packed_buffer_size_bytes = PACKED_BYTES

    def send(self, bucket: Bucket) -> Sending:
        """Broadcast the bucket's tensors while the instances receive them."""
        names = [spec.name for spec in bucket.specs]
        tensors = list(zip(names, bucket.tensors, strict=True))
        return Sending(self._engine, self._group, tensors, self._timeout_s)


class Sending:
    """A call of `trainer_send_weights` in a thread, since it blocks until the bytes are sent."""

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
        """Wait until the bytes are sent. Raises TransferError, DeadlineError."""
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"a bucket of weights was not through within {self._timeout_s:g} s")
        if self._error is not None:
            raise TransferError(f"a member of the weight transfer failed: {self._error}")
