"""The interface through which the engine uses the training machine. cpu, cuda and npu implement it."""

from __future__ import annotations

import json
import os
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from engine.errors import BadInput

TRACKED = "megatron."
"""Prefix of the names of Megatron's random streams in `rng_state` (dropout in tensor- and expert-parallel regions)."""


class Platform(ABC):
    """One kind of machine. It is stateless; one object serves the whole process."""

    name: ClassVar[str]
    """The value of `platform.device` in the configuration."""
    backend: ClassVar[str]
    """Backend of torch.distributed for the collectives between ranks."""
    attention: ClassVar[str]
    """Attention backend (a key of `engine.model.kernels.KERNELS`)."""

    @abstractmethod
    def missing(self) -> str | None:
        """Return what the platform needs and this process lacks; None if nothing is missing."""

    def present(self) -> bool:
        """Whether "auto" chooses the platform: its hardware and torch's binding to it are present."""
        return self.missing() is None

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """Return the device of the rank with this local number."""

    @abstractmethod
    def set_device(self, local_rank: int) -> torch.device:
        """Make that rank's device the process's current device, and return it."""

    @abstractmethod
    def device_name(self, number: int) -> str:
        """Return the name of this machine's device with this number, as torch reports it, or "CPU"."""

    @abstractmethod
    def adapt_megatron(self) -> None:
        """Make megatron-core run on this platform. Call this before building a model; repeated calls are harmless."""

    @abstractmethod
    def make_deterministic(self) -> None:
        """Make equal inputs give equal bits. Call this before the first use of the device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished all queued work (for time measurements)."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the most bytes held since the start: device memory, or on a CPU the process's memory."""

    @abstractmethod
    def held_bytes(self) -> int:
        """Return the bytes held now, of the memory that `peak_bytes` counts."""

    @abstractmethod
    def memory_summary(self) -> str:
        """Return a table of what occupies the memory that `peak_bytes` counts."""

    @abstractmethod
    def profiler(self, folder: Path, name: str) -> Any:  # noqa: ANN401
        """Return a profiler, not yet started, of this process and its device. `start()` begins recording; `stop()`
        writes the trace `name` into `folder`."""

    def rng_state(self) -> dict[str, Tensor]:
        """Return the states of the random generators by name, each as a uint8 tensor on the host: "python", "cpu"
        (torch) and those of Megatron's tracker. An accelerator adds its device's state."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        tracked = get_cuda_rng_tracker().get_states()
        return {
            "python": torch.frombuffer(bytearray(json.dumps(random.getstate()).encode()), dtype=torch.uint8),
            "cpu": torch.get_rng_state(),
            **{TRACKED + name: state.cpu() for name, state in tracked.items()},
        }

    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        """Restore the random streams from a result of `rng_state`. Raises BadInput if its names differ from this
        process's."""
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


def torch_profiler(folder: Path, name: str, activities: Iterable[ProfilerActivity]) -> profile:
    """Return torch's profiler, not yet started. When stopped, it writes `folder/name.json.gz`, a Chrome trace."""

    def write(found: profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(folder / f"{name}.json.gz"))

    return profile(activities=activities, on_trace_ready=write)


def without_transformer_engine() -> None:
    """Define the name of a Transformer Engine kernel that Megatron's router reads. Megatron leaves it undefined if
    Transformer Engine is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about optional packages that are not installed
        from megatron.core.transformer.moe import moe_utils
    vars(moe_utils).setdefault("te_general_gemm", None)


class Accelerator(Platform):
    """Common base of cuda and npu: torch has the same functions for both, in `torch.cuda` and `torch.npu`."""

    in_order: ClassVar[dict[str, str]]
    """Environment variables that make the platform's libraries sum in the same order each time."""

    @abstractmethod
    def api(self) -> ModuleType:
        """Return `torch.cuda` or `torch.npu`."""

    def make_deterministic(self) -> None:
        """Set the libraries' variables, except those already set, and make torch refuse every operator without a
        deterministic kernel."""
        for name, value in self.in_order.items():
            os.environ.setdefault(name, value)
        torch.use_deterministic_algorithms(True)

    def device(self, local_rank: int) -> torch.device:
        """Return the device with the rank's local number. Raises BadInput if there are too few devices."""
        count = self.api().device_count()
        if local_rank >= count:
            raise BadInput(
                f"rank {local_rank} of this machine has no {self.name} device: there are {count}; "
                "use fewer ranks per machine or make more devices visible"
            )
        return torch.device(self.name, local_rank)

    def set_device(self, local_rank: int) -> torch.device:
        """Make the rank's device current, which Megatron uses from then on, and return it."""
        device = self.device(local_rank)
        self.api().set_device(device)
        return device

    def device_name(self, number: int) -> str:
        """Return torch's name of the device."""
        return str(self.api().get_device_name(number))

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self.api().synchronize()

    def peak_bytes(self) -> int:
        """Return the most bytes held by tensors at one time, as counted by torch's allocator."""
        return int(self.api().max_memory_allocated())

    def held_bytes(self) -> int:
        """Return the bytes held by tensors now, as counted by torch's allocator."""
        return int(self.api().memory_allocated())

    def memory_summary(self) -> str:
        """Return torch's table of its allocator."""
        return str(self.api().memory_summary())

    def rng_state(self) -> dict[str, Tensor]:
        """Return the streams that every platform has, and the device's as "device"."""
        return {**super().rng_state(), "device": self.api().get_rng_state().cpu()}

    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        """Restore the streams that every platform has, and the device's."""
        super().set_rng_state(state)
        self.api().set_rng_state(state["device"])
