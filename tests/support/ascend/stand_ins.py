"""Modules in place of torch_npu, torchair, triton and einops, which MindSpeed's adaptor imports, on a CPU.

They hold the names that the adaptor reads when it is loaded, and no more. Kernels are `Absent`: whoever calls one gets
an error with its name, so no number of a test can come out of a stand-in. `torch.npu` answers for the host.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
import torch._dynamo  # looks for triton when it is imported, and would take the stand-in for a real one

TORCH_NPU = "2.10.0.post4"
"""The version that the stand-in gives."""


class Absent:
    """A function or class without a stand-in. It may be read, named as a type and decorated with, but not called."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.name} has no stand-in on a CPU")


def module(name, **content):
    """A module in sys.modules, with `Absent` for each name that is given None."""
    made = ModuleType(name)
    made.__path__ = []
    made.__file__ = f"/stand-in/{name.replace('.', '/')}/__init__.py"
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    sys.modules[name] = made
    vars(made).update({key: Absent(f"{name}.{key}") if value is None else value for key, value in content.items()})
    parent, _, last = name.rpartition(".")
    if parent:
        vars(sys.modules[parent])[last] = made
    return made


def install():
    """Put all stand-ins into sys.modules. Those of packages that are installed too, as einops may be, are left out."""
    torch_npu()
    torchair()
    if importlib.util.find_spec("triton") is None:
        triton()
    if importlib.util.find_spec("einops") is None:
        module("einops", rearrange=None)


def torch_npu():
    """torch_npu and `torch.npu`. Its `transfer_to_npu` does nothing: on_host.py says where `torch.cuda` is the host."""
    module("torch_npu", __version__=TORCH_NPU, unsupported_dtype=[])
    api = module(
        "torch_npu.npu",
        mstx=SimpleNamespace(range_start=lambda *args: 0, range_end=lambda *args: None),
        Stream=torch.cpu.Stream,
        device=None,
        _lazy_call=lambda call: call(),
        get_device_name=lambda *args: "host",
        is_available=lambda: True,
        device_count=lambda: 1,
        set_device=lambda device: None,
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda: None,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    torch.npu = api
    module("torch_npu._C", _distributed_c10d=SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=object)))
    module("torch_npu.contrib")
    module("torch_npu.contrib.transfer_to_npu")


def torchair():
    """torchair, whose converters of operators to graphs are registered and never called."""
    module("torchair", register_fx_node_ge_converter=lambda operator: lambda convert: convert)
    module("torchair.ge", Tensor=None, TensorSpec=None, DataType=None)


def triton():
    """triton with an NPU as its target: decorators that give back `Absent` kernels."""
    module(
        "triton",
        __version__="3.2.0",
        jit=_kernel,
        autotune=_kernel,
        heuristics=_kernel,
        Config=lambda *args, **options: None,
        cdiv=None,
        next_power_of_2=None,
    )
    module(
        "triton.language",
        constexpr=object,
        make_tensor_descriptor=None,
        exp=None,
        log=None,
        log2=None,
        dtype=object,
        int32=object,
        math=SimpleNamespace(exp2=None),
    )
    module("triton.language.extra")
    module("triton.language.extra.libdevice")
    module("triton.runtime")
    target = SimpleNamespace(backend="npu")
    module("triton.runtime.driver", active=SimpleNamespace(get_current_target=lambda: target))


def _kernel(function=None, **options):
    """A decorator of kernels, with options or without."""
    if callable(function):
        return Absent(getattr(function, "__name__", "kernel"))
    return _kernel
