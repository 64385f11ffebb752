"""Which of torch's operators training calls, and which of them the wheel of torch_npu has a kernel for.

The recorder sees what reaches a device after autograd. An operator that torch_npu does not list is computed by torch's
kernel for every device, where there is one, so that the operators that this is made of are recorded too. What a fused
operator of torch_npu does inside, on a CPU in its place, is left out, and so is its backward pass.
"""

import re
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LISTS = ("npu_native_functions.yaml", "npu_native_functions_by_codegen.yaml")
BY_OTHERS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
"""Keys of torch's own kernels for every device."""


class Recorder(TorchDispatchMode):
    """The names of the operators that are called, such as "add.Tensor". `listed`: those that torch_npu has."""

    def __init__(self, listed):
        super().__init__()
        self.listed = listed
        self.names = set()
        self.paused = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.paused or func.namespace != "aten":
            return func(*args, **kwargs or {})
        name = func.__name__.removesuffix(".default")
        apart = name not in self.names and name not in self.listed  # once is enough
        self.names.add(name)
        for key in keys_of(name) if apart else []:
            try:
                with self:
                    return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs or {})
            except (RuntimeError, NotImplementedError):
                pass  # an argument that can't be given this way; what the kernel called first is recorded
        return func(*args, **kwargs or {})

    @contextmanager
    def pause(self):
        """Record nothing meanwhile."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def unseen(self, kernel):
        """The kernel without a record of what it does, nor of what its backward pass does."""

        def call(*given):
            return _Unseen.apply(self, kernel, *given)

        return call


class _Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recorder, kernel, *given):
        with recorder.pause(), torch.enable_grad():
            given = [x.detach().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in given]
            out = kernel(*given)
        ctx.kept = recorder, given, out
        return out.detach()

    @staticmethod
    def backward(ctx, grad):
        recorder, given, out = ctx.kept
        with recorder.pause():
            tracked = [x for x in given if torch.is_tensor(x) and x.requires_grad]
            grads = iter(torch.autograd.grad(out, tracked, grad))
        return None, None, *(next(grads) if torch.is_tensor(x) and x.requires_grad else None for x in given)


def supported(wheel):
    """The names of torch's operators that torch_npu lists a kernel for."""
    found = set()
    for name in LISTS:
        text = wheel.read(f"torch_npu/csrc/aten/{name}").decode()
        section = re.search(r"^supported:\n((?:[ -].*\n|\n)*)", text, re.MULTILINE)[1]
        found |= set(re.findall(r"^ *-? *(?:func: )?([a-z_][\w.]*)(?:\(.*)?$", section, re.MULTILINE))
    return found


def keys_of(name, keys=BY_OTHERS):
    """Those of the keys under which torch has the operator."""
    return [key for key in keys if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)]


def kinds(names, listed):
    """The names by where their kernel is: "kernel" in torch_npu's list, "others" made of other operators, "none"."""
    found = {"kernel": [], "others": [], "none": []}
    for name in sorted(names):
        composite = keys_of(name, (*BY_OTHERS, "CompositeImplicitAutograd"))
        found["kernel" if name in listed else "others" if composite else "none"].append(name)
    return found
