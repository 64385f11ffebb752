"""Megatron-core on a CPU: what its modules expect of `torch.cuda`, answered by the host.

megatron-core calls `torch.cuda` and `device="cuda"` in many places. Instead of patching the real torch (which every other
library in the process would see), each `megatron.core.*` module gets a private *view* of torch in which these names mean
the CPU. MindSpeed does the same for Ascend with its `megatron_adaptor` and `transfer_to_npu`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "gloo"
"""Collectives backend of torch.distributed."""

LAZY = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.distributed",
    "megatron.core.timers",
    "megatron.core.transformer.moe.moe_layer",
)
"""Modules that Megatron imports late; they must be there before the view is put in."""

CREATORS = ("tensor", "zeros", "ones", "empty", "arange", "full")


def adapt_megatron() -> None:
    """Give every loaded megatron.core module the host's view of torch. Call once, before building a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # absent Transformer Engine and Apex, which a CPU has no use for
        for name in LAZY:
            importlib.import_module(name)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    view = _host_view()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = view
        if name.startswith("megatron.core.optimizer"):
            _rename_types(module)


def _rename_types(module: types.ModuleType) -> None:
    """The optimizer compares `tensor.type()` with CUDA type names, which no view of torch reaches: rename the constants."""
    functions = [item for item in vars(module).values() if inspect.isfunction(item)]
    for item in vars(module).values():
        if inspect.isclass(item) and item.__module__ == module.__name__:
            functions += [getattr(method, "__func__", method) for method in vars(item).values()]
    for function in functions:
        if inspect.isfunction(function) and function.__module__ == module.__name__:
            function.__code__ = _with_host_types(function.__code__)


def _with_host_types(code: types.CodeType) -> types.CodeType:
    def host(constant: object) -> object:
        if isinstance(constant, str) and constant.startswith("torch.cuda.") and constant.endswith("Tensor"):
            return constant.replace("torch.cuda.", "torch.")
        if isinstance(constant, tuple):
            return tuple(host(part) for part in constant)
        return _with_host_types(constant) if isinstance(constant, types.CodeType) else constant

    return code.replace(co_consts=tuple(host(constant) for constant in code.co_consts))


@contextmanager
def megatron(seed: int) -> Iterator[None]:
    """Process group and Megatron's parallel state from torch elastic's environment, for the time of the body."""
    dist.init_process_group(BACKEND)
    with _parallel_state(seed):
        yield


@contextmanager
def _parallel_state(seed: int) -> Iterator[None]:
    adapt_megatron()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def single_process(seed: int = 0) -> Iterator[None]:
    """`megatron` for a process on its own (conversion, tests), without a launcher."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(BACKEND, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        with _parallel_state(seed):
            yield


def _host_view() -> types.ModuleType:
    """A module that looks like torch, with `torch.cuda` and `device="cuda"` meaning the CPU."""
    view = types.ModuleType("torch")
    view.__dict__.update({key: value for key, value in vars(torch).items() if key not in ("__name__", "__spec__")})
    view.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]
    vars(view)["cuda"] = _host_cuda()
    for name in CREATORS:
        vars(view)[name] = _on_host(getattr(torch, name))
    return view


def _host_cuda() -> types.ModuleType:
    cuda = types.ModuleType("torch.cuda")
    cuda.__dict__.update({key: value for key, value in vars(torch.cuda).items() if not key.startswith("__")})
    cuda.__dict__.update({name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    vars(cuda).update(
        current_device=lambda: torch.device("cpu"),
        manual_seed=torch.manual_seed,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    )
    return cuda


def _on_host(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def created(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        return create(*args, **kwargs)

    return created
