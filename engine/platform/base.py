"""What the engine needs to know of the machine it trains on: one small interface, implemented by cpu, cuda and npu."""

from __future__ import annotations

import json
import random
import warnings
from abc import ABC, abstractmethod
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from engine.errors import BadInput

TRACKED = "megatron."
"""Prefix of the streams that Megatron's tracker keeps (dropout in tensor- and expert-parallel regions)."""


class Platform(ABC):
    """One kind of machine. Stateless; the same object serves the whole process."""

    name: ClassVar[str]
    """The value of `platform.device` in the configuration."""
    backend: ClassVar[str]
    """Backend of torch.distributed for the collectives between ranks."""
    attention: ClassVar[str]
    """Attention backend (a key of `engine.model.kernels.KERNELS`)."""

    @abstractmethod
    def missing(self) -> str | None:
        """What this process lacks for the platform, or None if it is there."""

    def present(self) -> bool:
        """Whether the hardware and torch's binding to it are there, so that "auto" chooses the platform."""
        return self.missing() is None

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """The device of the rank with that number on this machine."""

    @abstractmethod
    def set_device(self, local_rank: int) -> torch.device:
        """Make it the process's current device, and return it."""

    @abstractmethod
    def adapt_megatron(self) -> None:
        """Make megatron-core run here. Again and again is harmless; needed before a model is built."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when the device has done all that was asked of it (for time measurements)."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Most memory held since the start or the last `reset_peak`: device memory, on a CPU the process's."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start `peak_bytes` again from what is held now."""

    def rng_state(self) -> dict[str, Tensor]:
        """Every random stream of the process by name, each a uint8 tensor on the host: "python", "cpu", Megatron's."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        tracked = get_cuda_rng_tracker().get_states()
        return {
            "python": torch.frombuffer(bytearray(json.dumps(random.getstate()).encode()), dtype=torch.uint8),
            "cpu": torch.get_rng_state(),
            **{TRACKED + name: state.cpu() for name, state in tracked.items()},
        }

    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        """Take up the streams of `rng_state`. Raises BadInput if they are not those of this platform."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        expected = set(self.rng_state())
        if set(state) != expected:
            raise BadInput(
                f"random state has the streams {sorted(state)}, this rank on {self.name} has {sorted(expected)}"
            )
        version, internal, gauss = json.loads(bytes(state["python"].tolist()))
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(state["cpu"])
        tracked = {name.removeprefix(TRACKED): value for name, value in state.items() if name.startswith(TRACKED)}
        get_cuda_rng_tracker().set_states(tracked)


def without_transformer_engine() -> None:
    """Megatron's router asks for one of Transformer Engine's kernels by a name that it leaves undefined without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of what it does not find
        from megatron.core.transformer.moe import moe_utils
    vars(moe_utils).setdefault("te_general_gemm", None)


class Accelerator(Platform):
    """What cuda and npu have in common: torch gives both the same functions in a namespace of their own."""

    @abstractmethod
    def api(self) -> ModuleType:
        """`torch.cuda` or `torch.npu`."""

    def device(self, local_rank: int) -> torch.device:
        """Devices are numbered as the ranks on this machine. Raises BadInput if there are fewer."""
        count = self.api().device_count()
        if local_rank >= count:
            raise BadInput(
                f"rank {local_rank} of this machine has no {self.name} device: there are {count}; "
                "lower the ranks per machine or make more devices visible"
            )
        return torch.device(self.name, local_rank)

    def set_device(self, local_rank: int) -> torch.device:
        """Also what Megatron takes for the current device from then on."""
        device = self.device(local_rank)
        self.api().set_device(device)
        return device

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self.api().synchronize()

    def peak_bytes(self) -> int:
        """Bytes of tensors at most, as torch's allocator counts them."""
        return int(self.api().max_memory_allocated())

    def reset_peak(self) -> None:
        """Count from now on."""
        self.api().reset_peak_memory_stats()

    def rng_state(self) -> dict[str, Tensor]:
        """Also the device's own stream, "device"."""
        return {**super().rng_state(), "device": self.api().get_rng_state().cpu()}

    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        """Also the device's."""
        super().set_rng_state(state)
        self.api().set_rng_state(state["device"])
