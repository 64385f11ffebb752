"""A trainer rank on an accelerator that is not there.

Tensors on the device are torch's fake tensors: they have shapes, types and a device, but no data. All else is real: the
trainer's code, Megatron, tensors on the host. Two devices in one operator are an error, as on a real one. What the
device would send to the host reads as zeros (a copy) or one (a number), and is counted: the host has to wait for it.

`fake_npu` is for a trainer rank. Its device is torch's Python-made one, named "npu" here, so that the code takes its
path for Ascend. torch lets a process name it once. So whoever imports this should do nothing else in the same process.
`everywhere` is for code that needs no gradients; its device may also be a "cuda", whose gradients torch's build for the
CPU can't compute.
"""

from __future__ import annotations

import ctypes
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from fake_operators import define_operators
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.platform.base import without_transformer_engine
from engine.platform.host_view import Stream
from engine.platform.npu import Npu
from engine.platform.parallel import parallel_session
from engine.trainer.ranks import models
from engine.trainer.ranks.rank_group import RankGroup

backend_registration._setup_privateuseone_for_python_backend("npu")
DEVICE = torch.device("npu", 0)
VIEWS = frozenset(
    [
        "_unsafe_view",
        "alias",
        "as_strided",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "lift_fresh",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unsqueeze",
        "view",
    ]
)
"""Operators of aten that start no kernel on a device."""


class FakeNpu(Npu):
    """The platform for Ascend, as far as it needs no NPU and no MindSpeed."""

    backend = "cpu:fake,npu:fake"

    def device(self, local_rank: int) -> torch.device:
        """Return the one device."""
        return DEVICE

    def set_device(self, local_rank: int) -> torch.device:
        """Return the one device."""
        return DEVICE

    def device_name(self, number: int) -> str:
        """Return the name of no known device: there is no peak to compare with."""
        return "not there"

    def adapt_megatron(self) -> None:
        """Leave Megatron as it is; `_CudaIsNpu` does what MindSpeed does for its device."""
        without_transformer_engine()


class AloneOnTheChannel(RankGroup):
    """A rank of a larger layout that hears nothing from the others on the CPU channel."""

    def __init__(self, lockstep: int = 1) -> None:
        with patch.object(dist, "get_world_size", lambda: 1):
            super().__init__(lockstep)


OPERATORS = define_operators()
"""Kept: the operators end with it."""


class _FakeInThreads(FakeTensorMode):
    """torch's fake tensors in several threads: whether one of them is within an operator, where a fake tensor says that
    it lies on "meta", is no other's business."""

    _of_thread = threading.local()

    @property
    def in_kernel_invocation(self) -> bool:
        return getattr(self._of_thread, "within", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, within: bool) -> None:
        self._of_thread.within = within


class FakeDevice(TorchDispatchMode):
    """Runs what concerns devices of this kind on fake tensors, and counts it. May be entered by several threads."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        super().__init__()
        self.device = device
        self.kernels: Counter[str] = Counter()
        """Operators that a device has to start, by name."""
        self.moved = 0
        """Bytes that these read and write: those of their tensors, each once."""
        self.waits: list[str] = []
        """Where the host waited for the device: operator, and the lines that led to it."""
        self.collectives: list[tuple[str, tuple[torch.Size, ...]]] = []
        """Collectives in their order, with the shapes of their tensors."""
        self.held = 0
        """Bytes of the tensors on the device."""
        self.peak = 0
        """Most bytes since the beginning, or since it was set to `held`."""
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._fake = _FakeInThreads(allow_non_fake_inputs=True)
        self._alone = threading.RLock()
        """Held by the thread that computes on fake tensors."""

    def clear(self) -> None:
        """Count anew."""
        self.kernels.clear()
        self.moved = 0
        self.waits.clear()
        self.collectives.clear()

    def wait(self, name: str) -> None:
        """Count a wait of the host."""
        self.waits.append(name + "\n" + "".join(traceback.format_stack(limit=14)[:-2]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not there and not self.means(kwargs.get("device")):
            return func(*args, **kwargs)
        name = func._schema.name
        if name.startswith("c10d::"):
            self.collectives.append((name, tuple(tensor.shape for tensor in tensors)))
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        operator = name.removeprefix("aten::")
        if operator == "_local_scalar_dense":
            self.wait(operator)
            return torch.ones((), dtype=args[0].dtype).item()
        if operator == "_to_copy" and str(kwargs.get("device")) == "cpu":
            self.wait(operator)
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if operator == "copy_" and args[0].device.type == "cpu":
            if not any(args[2:]) and not kwargs.get("non_blocking"):
                self.wait(operator)
            return args[0].zero_()
        with self._alone, self._fake:
            if operator == "_to_copy" and not there:  # from the host, without its data
                made = torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs["device"])
            else:
                made = func(*args, **kwargs)
            if operator not in VIEWS and not name.startswith("prim::"):
                self.kernels[operator] += 1
                touched = (leaf for leaf in (*tensors, *tree_leaves(made)) if isinstance(leaf, FakeTensor))
                self.moved += sum(tensor.nbytes for tensor in touched)
            for leaf in tree_leaves(made):
                if isinstance(leaf, FakeTensor) and self.means(leaf.device):
                    self._hold(leaf.untyped_storage())
        return made

    def means(self, device: object) -> bool:
        """Whether a device is of this kind."""
        return str(device).startswith(self.device.type)

    def _hold(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until nothing uses it any more."""
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()

        def release(_: object) -> None:
            del self._storages[key]
            self.held -= size

        self._storages[key] = weakref.ref(storage, release)
        self.held += size
        self.peak = max(self.peak, self.held)


@contextmanager
def everywhere(device: torch.device) -> Iterator[FakeDevice]:
    """A device that this thread has, and all that start within the block."""
    found = FakeDevice(device)
    run = threading.Thread.run
    if device.type == "cuda" and not torch.backends.cuda.is_built():
        _guard_nothing()

    def entered(thread: threading.Thread) -> None:
        with _TensorsOf(found), found:
            run(thread)

    with (
        patch.object(threading.Thread, "run", entered),
        patch.object(torch.cuda, "_lazy_init", _ignore),
        patch.object(FakeTensor, "data_ptr", lambda tensor: 0),
        _TensorsOf(found),
        found,
    ):
        yield found


def _guard_nothing() -> None:
    """Give torch's build for the CPU a guard of CUDA devices, which `Tensor.contiguous` and others ask for: that of the
    device "meta", which does nothing."""
    types = torch._C._autograd.DeviceType
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    guards = (ctypes.c_void_p * (types.Meta.value + 1)).in_dll(libc10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[types.CUDA.value] = guards[types.Meta.value]


class _TensorsOf(TorchFunctionMode):
    """`torch.tensor` on the device: torch's own code can't make fake tensors."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        call = self._tensor if func in (torch.tensor, torch.as_tensor) else lambda func, *a, **k: func(*a, **k)
        return call(func, *args, **kwargs or {})

    def _tensor(self, func: Any, data: Any, device: Any = None, **kwargs: Any) -> Tensor:  # noqa: ANN401
        leaves = tree_leaves(data)
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):
            for _ in leaves:
                self._device.wait("torch.tensor of numbers on the device")
            made = torch.zeros(len(leaves))
        else:
            made = func(data, **kwargs)
        return made.to(device) if self._device.means(device) else made


class _CudaIsNpu(_TensorsOf):
    """What MindSpeed does for Megatron: device="cuda" and `tensor.cuda()` mean the NPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = DEVICE
        if func is Tensor.cuda:
            return args[0].to(DEVICE)
        found = super().__torch_function__(func, types, args, kwargs)
        return found.replace("torch.npu.", "torch.cuda.") if func is Tensor.type and isinstance(found, str) else found


@contextmanager
def fake_npu(rank: int = 0, world: int = 1, **sizes: int) -> Iterator[FakeDevice]:
    """Be one rank of `world` on the fake device, by the sizes that `engine.platform.parallel.parallel_session` takes.
    Weights are not read from files."""
    device = FakeDevice()
    place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    with ExitStack() as stack:
        stack.enter_context(patch.dict("os.environ", place))
        for name, replacement in _torch_cuda().items():
            stack.enter_context(patch.object(torch.cuda, name, replacement))
        start = dist.init_process_group
        stack.enter_context(
            patch.object(
                dist,
                "init_process_group",
                lambda backend, timeout: start(backend, store=FakeStore(), rank=rank, world_size=world),
            )
        )
        stack.enter_context(patch.object(dist, "all_gather_object", _all_say_the_same))
        stack.enter_context(patch.object(megatron_random, "_get_cuda_rng_state", _rng_state))
        stack.enter_context(patch.object(megatron_random, "_set_cuda_rng_state", _ignore))
        stack.enter_context(patch.object(torch.nn.Module, "_apply", _apply))
        stack.enter_context(patch.object(models, "_load_weights", _ignore))
        stack.enter_context(patch.object(P2PCommunicator, "_communicate_shapes", _shapes_of_own))
        stack.enter_context(_CudaIsNpu(device))
        stack.enter_context(device)
        stack.enter_context(parallel_session(FakeNpu(), 0, **sizes))
        yield device


def _torch_cuda() -> dict[str, Any]:
    return {
        "Stream": Stream,
        "current_device": lambda: DEVICE,
        "current_stream": lambda *args: Stream(),
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "get_rng_state": lambda *arguments: _rng_state(),
        "manual_seed": lambda seed: None,
        "set_rng_state": lambda *arguments: None,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None,
    }


def _ignore(*args: object, **kwargs: object) -> None:
    """Do nothing."""


def _rng_state(*args: object, **kwargs: object) -> Tensor:
    return torch.get_rng_state()


def _shapes_of_own(
    stage: P2PCommunicator,
    tensor_send_next: Tensor | None,
    tensor_send_prev: Tensor | None,
    recv_prev: bool,
    recv_next: bool,
) -> tuple[object, object]:
    """What pipeline stages tell each other of their tensors, where all have the shape of the stage's own."""
    for sent in (tensor_send_next, tensor_send_prev):
        if sent is not None:
            vars(stage)["own_shape"] = list(sent.shape)
    shape = vars(stage)["own_shape"]
    return shape if recv_prev else None, shape if recv_next else None


def _all_say_the_same(objects: list[object], mine: object, group: object = None) -> None:
    objects[:] = [mine] * len(objects)


def _apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:  # noqa: ANN401
    """`torch.nn.Module._apply` by new parameters: torch's own changes a parameter's storage, which can't become that of
    a fake tensor."""
    for child in module.children():
        _apply(child, function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            moved = torch.nn.Parameter(function(parameter.detach()), parameter.requires_grad)
            vars(moved).update(vars(parameter))
            module._parameters[name] = moved
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module
