"""Selective recomputation: large, cheap outputs are not kept for the backward pass but recomputed there.

These are the outputs of the norms and of SwiGLU, which work element by element. This is Megatron's
`recompute_granularity = "selective"` with the modules "layernorm" and "moe_act" (Korthikanti et al., arXiv:2205.05198
§5, for the idea), extended to dense MLPs. For those Megatron can only recompute the whole MLP: two thirds of a layer's
products or more, for half of its memory. No generator state is kept, because nothing in our layers is random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from engine.model.experts import GroupedExperts
from engine.model.norm import Sum
from engine.model.swiglu import SwiGLU


def install_recompute(model: GPTModel) -> None:
    """Make this rank's layers recompute the outputs of their norms and of SwiGLU in the backward pass. The same
    operation gets the same inputs, so gradients have the same bits."""
    for layer in model.decoder.layers:
        cheap = _CheapOutputs()
        layer.input_layernorm.forward = partial(cheap.make, layer.input_layernorm.forward)
        layer.pre_mlp_layernorm.forward = partial(cheap.make, layer.pre_mlp_layernorm.forward)
        for part in layer.mlp.modules():
            if isinstance(getattr(part, "activation_func", None), SwiGLU):
                part.activation_func = partial(cheap.make, part.activation_func)
            if isinstance(part, GroupedExperts):
                part.activate = partial(cheap.make, part.activate)  # type: ignore[method-assign]
        for reader in (layer.self_attention.linear_qkv, layer.mlp):
            reader.forward = partial(cheap.read, reader.forward)


@dataclass(frozen=True)
class _Dropped:
    """Replaces a saved tensor: it holds what is needed to recompute it."""

    operation: Callable[[], Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _CheapOutputs:
    """A layer's cheap outputs, between the operation that computes one and the module that reads it. What that module
    would save of them is dropped. Each output is held until then, so that its storage identifies it."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    def make(self, operation: Callable[..., Tensor], *inputs: Tensor | Sum) -> Tensor:
        """Return the operation's output, and remember how to recompute it."""
        out = operation(*inputs)
        if out.requires_grad and out.numel():
            self._made[out.untyped_storage().data_ptr()] = out, _again(operation, *inputs)
        return out

    def read(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the module's forward pass, and drop the cheap outputs that it would save."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                return forward(*args, **kwargs)
        finally:
            self._made.clear()

    def _pack(self, saved: Tensor) -> Tensor | _Dropped:
        _, again = self._made.get(saved.untyped_storage().data_ptr(), (None, None))
        if again is not None and saved.numel():
            return _Dropped(again, saved.size(), saved.stride(), int(saved.storage_offset()))
        # keep a parameter itself, because Megatron sets its attributes in the backward pass
        return saved if saved.is_leaf else saved.detach()


def _again(operation: Callable[..., Tensor], *inputs: Tensor | Sum) -> Callable[[], Tensor]:
    """Return a function that recomputes the output from tensors that the operation's backward pass keeps anyway."""
    if isinstance(inputs[0], Sum) and inputs[0].made is not None:
        total = inputs[0].made.detach()
        return lambda: operation(Sum(total, torch.zeros_like(total)))  # the same kernel, so the same bits
    return partial(operation, *(one.detach() for one in inputs if isinstance(one, Tensor)))


def _unpack(kept: Tensor | _Dropped) -> Tensor:
    if isinstance(kept, _Dropped):
        return kept.operation().as_strided(kept.size, kept.stride, kept.offset)
    return kept
