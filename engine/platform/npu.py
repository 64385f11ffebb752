"""Ascend NPUs: torch_npu, HCCL, Megatron with MindSpeed's adaptor, and operators of torch_npu.

Written for torch_npu 2.10 and MindSpeed's branch core_r0.16.0 (which pairs with megatron-core 0.16.1). It has not run
on an NPU: the operators are tested by their published schemas, MindSpeed's adaptor on the host.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from engine.errors import BadInput
from engine.platform.base import Accelerator, without_transformer_engine

MINDSPEED_NEEDS = ("einops", "triton")
"""Modules that MindSpeed's adaptor imports and that neither Metronome nor torch_npu installs. triton-ascend provides
triton."""


class Npu(Accelerator):
    """One NPU per rank."""

    name = "npu"
    backend = "hccl"
    attention = "npu"
    in_order: ClassVar[dict[str, str]] = {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"}
    """The variables that MindSpeed sets (mindspeed/functional/npu_deterministic)."""

    def missing(self) -> str | None:
        """Return what is missing of torch_npu (its import needs CANN), a device, MindSpeed and the modules that it
        imports; None if nothing is."""
        if binding := self._missing_binding():
            return binding
        if importlib.util.find_spec("mindspeed") is None:
            return "the package mindspeed (branch core_r0.16.0) is not installed"
        absent = [name for name in MINDSPEED_NEEDS if importlib.util.find_spec(name) is None]
        return f"mindspeed can't be imported without the modules {', '.join(absent)}" if absent else None

    def present(self) -> bool:
        """Whether "auto" chooses the platform: torch_npu and a device are present. MindSpeed is not checked, because a
        machine with NPUs should be used as one: without MindSpeed `get_platform` raises an error instead of falling
        back."""
        return self._missing_binding() is None

    def _missing_binding(self) -> str | None:
        if importlib.util.find_spec("torch_npu") is None:
            return "the package torch_npu is not installed"
        try:
            api = self.api()
        except (ImportError, OSError, RuntimeError) as error:
            return f"torch_npu can't be imported ({error}); is CANN's environment set up?"
        return None if api.is_available() else "torch_npu finds no NPU (driver, ASCEND_RT_VISIBLE_DEVICES)"

    def api(self) -> ModuleType:
        """Return `torch.npu`, which the import of torch_npu adds to torch."""
        importlib.import_module("torch_npu")
        return vars(torch)["npu"]

    def profiler(self, folder: Path, name: str) -> Any:  # noqa: ANN401
        """Return torch_npu's profiler of the host and the NPU. It writes a folder with several files, whose name begins
        with `name`."""
        of_npu = importlib.import_module("torch_npu").profiler
        return of_npu.profile(
            activities=[of_npu.ProfilerActivity.CPU, of_npu.ProfilerActivity.NPU],
            on_trace_ready=of_npu.tensorboard_trace_handler(str(folder), worker_name=name),
        )

    def adapt_megatron(self) -> None:
        """Import MindSpeed's adaptor, which patches megatron-core.

        The adaptor parses sys.argv for its options. During the import sys.argv has no options, so that the adaptor uses
        its defaults instead of this process's arguments. Raises BadInput if a module that it imports is not installed.
        """
        importlib.import_module("torch_npu")
        arguments = sys.argv
        sys.argv = sys.argv[:1]
        try:
            importlib.import_module("mindspeed.megatron_adaptor")
        except ModuleNotFoundError as error:
            raise BadInput(
                f'platform.device = "npu": mindspeed can\'t be imported without the module {error.name}'
            ) from error
        finally:
            sys.argv = arguments
        without_transformer_engine()
