"""The torch.distributed backends that broadcast weights, and their differences. Needs only torch, not vLLM.

The NCCL and HCCL code follows the published sources of torch 2.13 and torch_npu 2.10.0.post4; it has not run on
hardware.
"""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from engine.errors import BadInput

POLL_S = 0.0005
"""Seconds between two checks of a running broadcast. A bucket takes hundreds of times longer."""


@dataclass(frozen=True)
class Membership:
    """A member's position in a group."""

    store: dist.Store
    rank: int
    world: int
    own: str
    """This machine's address, as used by the other members."""
    timeout_s: float


class GroupBackend:
    """A backend of torch.distributed."""

    device: ClassVar[str]
    """Type of the devices whose memory it sends."""

    def make(self, place: Membership) -> Any:  # noqa: ANN401
        """Make the group. Raises BadInput if this process lacks the backend, RuntimeError if the members fail."""
        raise NotImplementedError

    def connect(self, group: Any, device: torch.device) -> None:  # noqa: ANN401
        """Connect the members over their `device`, so that no broadcast has to, unless making the group has done it.
        Blocks, without a deadline, until all members have called it. Raises RuntimeError."""

    def abort(self, group: Any) -> None:  # noqa: ANN401
        """End the group's broadcasts, if the backend can. May block. Raises RuntimeError."""

    def finish(self, work: dist.Work) -> None:
        """Raise the RuntimeError of a completed broadcast, if it failed."""
        work.wait()


class Gloo(GroupBackend):
    """Sends from host memory to host memory. A broadcast ends at its timeout, or when a member leaves."""

    device = "cpu"

    def make(self, place: Membership) -> Any:  # noqa: ANN401
        """Return a ProcessGroupGloo."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
        options._timeout = timedelta(seconds=place.timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=place.own)]
        return dist.ProcessGroupGloo(place.store, place.rank, place.world, options)


class DeviceBackend(GroupBackend):
    """From device to device. By default the communicator is created in the first broadcast, which blocks until all
    members have called it. The sender would then block before the instances are told of the bucket."""

    def connect(self, group: Any, device: torch.device) -> None:  # noqa: ANN401
        """Create the communicator, and broadcast one byte.

        The byte is needed: HCCL creates its communicator only in a broadcast, and NCCL (from 2.22) connects the devices
        of a communicator in the first one.
        """
        group.eager_connect_single_device(device)
        work = group.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), 0)
        while not work.is_completed():
            time.sleep(POLL_S)
        self.finish(work)


class Nccl(DeviceBackend):
    """Sends between CUDA devices."""

    device = "cuda"

    def make(self, place: Membership) -> Any:  # noqa: ANN401
        """Return a ProcessGroupNCCL. torch's CPU build lacks it."""
        if not dist.is_nccl_available():
            raise BadInput("transport nccl: this process's torch is built without NCCL; use gloo or file")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=place.timeout_s)
        return dist.ProcessGroupNCCL(place.store, place.rank, place.world, options)

    def abort(self, group: Any) -> None:  # noqa: ANN401
        """End all broadcasts. The creation of a communicator is not interrupted."""
        group.abort()


class Hccl(DeviceBackend):
    """Sends between NPUs. Running calls end by HCCL_CONNECT_TIMEOUT or HCCL_EXEC_TIMEOUT: torch_npu's own abort holds
    the interpreter lock while it waits."""

    device = "npu"

    def make(self, place: Membership) -> Any:  # noqa: ANN401
        """Return a ProcessGroupHCCL of torch_npu."""
        for name in ("RANK_TABLE_FILE", "ROOTINFO_SUBCOMM_ENABLE"):
            if os.environ.get(name, "0") not in ("", "0"):
                raise BadInput(
                    f"transport hccl: the environment variable {name} is set, so torch_npu takes a group's members "
                    "from this process's own job; unset it, or use gloo or file"
                )
        try:
            made = importlib.import_module("torch_npu")._C._distributed_c10d.ProcessGroupHCCL
        except ImportError as error:
            raise BadInput(f"transport hccl: torch_npu can't be imported ({error}); use gloo or file") from None
        options = made.Options()
        options._timeout = timedelta(seconds=place.timeout_s)
        options.group_id = "weights"
        # without ranks torch_npu would mistake the group for the process's default group
        options.global_ranks_in_group = list(range(place.world))
        return made(place.store, place.rank, place.world, options)

    def finish(self, work: dist.Work) -> None:
        """Raise RuntimeError if the broadcast failed; HCCL's `wait` does not."""
        work.wait()
        if not work.is_success():
            raise RuntimeError("HCCL reports an error of the communicator")


BACKENDS: dict[str, GroupBackend] = {"gloo": Gloo(), "nccl": Nccl(), "hccl": Hccl()}
"""The backends by name, as in `weights.transport`."""


def use_device(device: torch.device) -> None:
    """Make it the current device of this thread. Threads start with device 0."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def group_device(backend: str, model: torch.device) -> torch.device:
    """Return the device whose memory a process with its model on `model` sends from and receives into.

    Raises BadInput for an unknown backend, and for a device that the backend can't reach.
    """
    if backend not in BACKENDS:
        raise BadInput(f"transport {backend!r}: expected one of {', '.join(BACKENDS)}")
    needed = BACKENDS[backend].device
    if needed == "cpu":
        return torch.device("cpu")
    if model.type != needed or model.index is None:
        raise BadInput(
            f"transport {backend}: this process's model is on {model}, not on a numbered {needed} device; use gloo or "
            "file"
        )
    return model
