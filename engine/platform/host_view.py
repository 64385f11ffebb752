"""Runs megatron-core on a CPU: in its modules, `torch.cuda` means the host.

megatron-core uses `torch.cuda`, `device="cuda"` and `tensor.cuda()` in many places. Patching the real torch would
change it for every other library in the process. So each `megatron.core.*` module gets a private *view* of torch in
which these names mean the CPU. A view can't change tensor methods and type names; these are renamed in the code of the
few functions that use them. MindSpeed does the same for Ascend with its `megatron_adaptor` and `transfer_to_npu`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

LAZY = (
    "dist_checkpointing",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "dist_checkpointing.strategies.checkpointable",
    "dist_checkpointing.strategies.common",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.strategies.torch",
    "distributed",
    "models.gpt.gpt_layer_specs",
    "models.gpt.gpt_model",
    "optimizer",
    "optimizer.distrib_optimizer",
    "optimizer_param_scheduler",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "tensor_parallel.random",
    "timers",
    "transformer.moe.experts",
    "transformer.moe.moe_layer",
    "transformer.moe.router",
    "transformer.moe.shared_experts",
    "transformer.moe.token_dispatcher",
)
"""Modules of megatron.core that Megatron imports late. `install_host_view` imports them, because it changes only loaded
modules."""

RENAMED = (
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.models.common.language_module.language_module",
    "megatron.core.optimizer",
)
"""Modules with functions that call `tensor.cuda()` or compare `tensor.type()` with names of CUDA types."""

CREATORS = (
    "tensor", "as_tensor", "zeros", "ones", "empty", "arange", "full", "rand", "randn", "randint",
    "zeros_like", "ones_like", "empty_like", "full_like",
)  # fmt: skip
"""torch functions that create a tensor. In the view they take `device="cuda"` as the CPU."""


def install_host_view() -> None:
    """Give every loaded megatron.core module the host's view of torch. Modules that already have it keep it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing Transformer Engine and Apex, which a CPU does not need
        for name in LAZY:
            importlib.import_module(f"megatron.core.{name}")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = _view()
            if name.startswith(RENAMED):
                _rename_cuda(module)
    _replace_functions()


def _replace_functions() -> None:
    """Replace the Megatron functions that reach CUDA in ways other than through the name torch."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    vars(random).update(_get_cuda_rng_state=_rng_state, _set_cuda_rng_state=_set_rng_state)
    vars(moe_utils).update(maybe_move_tensor_to_cpu=_on_cpu, te_general_gemm=None)
    vars(token_dispatcher).update(maybe_move_tensor_to_cpu=_on_cpu)


def _rng_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ANN401
    """Return the tensor, or its numpy array. Megatron's function returns host tensors unchanged even if its caller
    needs split sizes as numpy."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _rename_cuda(module: types.ModuleType) -> None:
    """In the module's functions, turn `tensor.cuda()` into `tensor.cpu()` and names of CUDA types into the host's."""
    for function in _functions(module):
        function.__code__ = _renamed(function.__code__)


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Yield all functions and methods that the module defines, without their decorators."""
    found = list(vars(module).values())
    classes = [item for item in found if inspect.isclass(item) and item.__module__ == module.__name__]
    found += [getattr(item, "__func__", item) for cls in classes for item in vars(cls).values()]
    for function in (inspect.unwrap(item) for item in found if inspect.isfunction(item)):
        if function.__module__ == module.__name__:
            yield function


def _renamed(code: types.CodeType) -> types.CodeType:
    """Return the code with its names and constants renamed, including those of inner functions."""

    def host(constant: object) -> object:
        if isinstance(constant, str) and constant.startswith("torch.cuda.") and constant.endswith("Tensor"):
            return constant.replace("torch.cuda.", "torch.")
        if isinstance(constant, tuple):
            return tuple(host(part) for part in constant)
        return _renamed(constant) if isinstance(constant, types.CodeType) else constant

    return code.replace(
        co_consts=tuple(host(constant) for constant in code.co_consts),
        co_names=tuple(
            "cpu" if name == "cuda" else name for name in code.co_names
        ),  # in the view `torch.cpu` and `torch.cuda` are the same module
    )


@cache
def _view() -> types.ModuleType:
    """Return a module with the names of torch, in which `torch.cuda` and `device="cuda"` mean the CPU."""
    view = types.ModuleType("torch")
    view.__dict__.update({key: value for key, value in vars(torch).items() if key not in ("__name__", "__spec__")})
    view.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]
    vars(view)["cuda"] = vars(view)["cpu"] = _host_cuda()
    for name in CREATORS:
        vars(view)[name] = _on_host(getattr(torch, name))
    return view


def _host_cuda() -> types.ModuleType:
    """Return a module with the names of `torch.cuda`, in which those that `torch.cpu` also has, and a few others, mean
    the CPU."""
    cuda = types.ModuleType("torch.cuda")
    cuda.__dict__.update({key: value for key, value in vars(torch.cuda).items() if not key.startswith("__")})
    cuda.__dict__.update({name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    vars(cuda).update(
        Stream=Stream,
        current_device=lambda: torch.device("cpu"),
        manual_seed=torch.manual_seed,
        get_rng_state=_rng_state,
        set_rng_state=_set_rng_state,
    )
    return cuda


class Stream(torch.cpu.Stream):
    """torch's host stream, which does all work immediately, with the constructor and the events of a CUDA stream."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        super().__init__(priority)

    def record_event(  # type: ignore[override]  # torch's own returns nothing, CUDA's an event
        self, event: torch.cpu.Event | None = None
    ) -> torch.cpu.Event:
        """Return an event. All work is already done, so there is nothing to wait for."""
        return event or torch.cpu.Event()

    def synchronize(self) -> None:
        """Do nothing: all work is already done."""


def _on_host(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function with `device="cuda"` taken as the CPU, where it uses no pinned memory."""

    def created(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        return create(*args, **kwargs)

    return created
