"""Converts weights between Hugging Face and Megatron, tensor by tensor, in any tensor-, pipeline- and expert-parallel
layout.

The rules are those of `engine.model.families`. Megatron's parallel state and the numbers of the layers it has built
determine which part of the model belongs to this rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from engine.errors import BadInput, MetronomeError
from engine.model.families import TIED_OUTPUT, Rule, parameter_rules
from engine.model.shape import ModelShape

Read = Callable[[str], Tensor]
"""Returns the whole Hugging Face tensor with this name, in any dtype."""

LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
EXPERT = "{expert}"


def padded_vocabulary(shape: ModelShape, tensor_size: int) -> int:
    """Return the number of rows of the embedding and the output layer: the vocabulary, rounded up to a multiple of the
    tensor-parallel size.

    Rows beyond the vocabulary are zero when loaded. Their logits belong to no token and must be excluded from a
    softmax.
    """
    return -(-shape.vocabulary // tensor_size) * tensor_size


@torch.no_grad()
def load_weights(model: GPTModel, read: Read, shape: ModelShape) -> None:
    """Copy Hugging Face tensors into every parameter of this rank's GPTModel: the rank's part, cast to the parameter's
    dtype.

    Holds the tensors of one parameter at a time. Raises BadInput for a tensor whose sizes do not match the shape.
    """
    parts = _Parts(model, shape)
    for name, parameter in model.named_parameters():
        for part, tensor in parts.of(name, parameter):
            _load_one(name=name, part=part, parameter=tensor, parts=parts, read=read, shape=shape)


def _load_one(*, name: str, part: _Part, parameter: Tensor, parts: _Parts, read: Read, shape: ModelShape) -> None:
    names = part.theirs(parts.first_expert)
    tensors = [read(theirs) for theirs in names]
    cut = _fuse_and_cut(part.rule, names, tensors, shape, *_tensor_rank(part))
    if cut.shape != parameter.shape:
        sizes = ", ".join(f"{theirs} {list(tensor.shape)}" for theirs, tensor in zip(names, tensors, strict=True))
        raise BadInput(
            f"sizes do not fit config.json: {sizes} give {list(cut.shape)} for {name}, expected {list(parameter.shape)}"
        )
    parameter.copy_(cut)


@torch.no_grad()
def export_weights(named: Mapping[str, Tensor], model: GPTModel, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) pairs of this rank's pipeline stage.

    `named`: Megatron name → a tensor with the parameter's sizes, for example the parameter itself or its gradient.
    Collective over the stage's tensor- and expert-parallel groups: every rank must give the same names in the same
    order and iterate to the end; all get the same pairs. A yielded tensor may share memory with `named`: copy it to
    keep it. The output layer of a tied model is not yielded: it is the embedding, which the first stage yields.
    """
    parts = _Parts(model, shape)
    for name, tensor in named.items():
        for part, piece in parts.of(name, tensor):
            if part.rule is not TIED_OUTPUT:
                yield from _export_one(part, piece, parts, shape)


def _export_one(part: _Part, tensor: Tensor, parts: _Parts, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    whole = _gather_and_split(part, tensor, shape)
    if part.expert is None:
        yield from zip(part.theirs(), whole, strict=True)
        return
    group = parallel_state.get_expert_model_parallel_group()
    columns = [_all_gather(piece, group) for piece in whole]
    for rank, pieces in enumerate(zip(*columns, strict=True)):
        yield from zip(part.theirs(rank * parts.local_experts), pieces, strict=True)


@dataclass(frozen=True)
class _Part:
    """One of this rank's parameters, or an expert's part of it, with its position in the whole model."""

    rule: Rule
    layer: int | None
    """Number of its layer in the whole model, from 0; None outside the layers."""
    expert: int | None
    """Number of its expert on this rank, from 0; None if it belongs to no expert."""

    def theirs(self, first_expert: int = 0) -> list[str]:
        """Return its Hugging Face names on a rank whose first expert has the number `first_expert`."""
        expert = None if self.expert is None else first_expert + self.expert
        return [name.format(layer=self.layer, expert=expert) for name in self.rule.theirs]


class _Parts:
    """Finds the rule and the position of a Megatron parameter name."""

    def __init__(self, model: GPTModel, shape: ModelShape) -> None:
        self._architecture = shape.architecture
        self._rules = parameter_rules(shape)
        # Megatron's names count the layers of a stage from 0; layer_number counts all layers from 1
        self._layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        count = shape.experts.count if shape.experts else 0
        self.local_experts = count // parallel_state.get_expert_model_parallel_world_size()
        self.first_expert = self.local_experts * parallel_state.get_expert_model_parallel_rank()

    def of(self, name: str, tensor: Tensor) -> Iterator[tuple[_Part, Tensor]]:
        """Yield the parts of a parameter, each with its tensor: one part, or one for each expert of this rank.
        `tensor`: a tensor with the parameter's sizes. Raises MetronomeError if the family has no rule for it."""
        layer = LAYER.search(name)
        pattern = LAYER.sub("{layer}", name)
        if pattern not in self._rules:
            raise MetronomeError(f"parameter {name} has no rule for {self._architecture} in engine/model/families.py")
        rule = self._rules[pattern]
        number = self._layers[int(layer.group())] if layer else None
        if EXPERT not in rule.theirs[0]:
            yield _Part(rule, number, None), tensor
            return
        for expert, own in enumerate(tensor):
            yield _Part(rule, number, expert), own


def _tensor_rank(part: _Part) -> tuple[int, int]:
    """Return (rank, size) in the tensor-parallel group that shares the parameter."""
    if part.expert is None:
        return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    return parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()


def _tensor_group(part: _Part) -> dist.ProcessGroup:
    """Return the tensor-parallel group that shares the parameter."""
    if part.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _fuse_and_cut(
    rule: Rule, names: list[str], tensors: list[Tensor], shape: ModelShape, rank: int, size: int
) -> Tensor:
    """Fuse the Hugging Face tensors of a parameter, and return the part of tensor rank `rank` of `size`."""
    if rule.fuse == "gate_up":
        return torch.cat([_cut(tensor, 0, rank, size) for tensor in tensors])
    whole = _fuse_qkv(names, tensors, shape) if rule.fuse == "qkv" else tensors[0]
    if rule.cut == "replicated":
        return whole
    if rule.cut == "vocabulary":
        whole = _check_rows(names[0], whole, shape.vocabulary)
        part = whole[rank * (rows := padded_vocabulary(shape, size) // size) : (rank + 1) * rows]
        return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])]) if len(part) < rows else part
    return _cut(whole, 1 if rule.cut == "row" else 0, rank, size)


def _cut(whole: Tensor, dim: int, rank: int, size: int) -> Tensor:
    if whole.shape[dim] % size:
        raise BadInput(f"a weight of sizes {list(whole.shape)} can't be cut evenly over parallel.tensor = {size}")
    return whole.chunk(size, dim)[rank]


def _check_rows(name: str, tensor: Tensor, rows: int) -> Tensor:
    if tensor.shape[0] != rows:
        raise BadInput(f"sizes do not fit config.json: {name} is {list(tensor.shape)}, expected {rows} rows")
    return tensor


def _qkv_heads(shape: ModelShape) -> list[int]:
    """Return the numbers of query, key and value heads per key-value head. Megatron stores these together."""
    return [shape.heads // shape.kv_heads, 1, 1]


def _fuse_qkv(names: list[str], tensors: list[Tensor], shape: ModelShape) -> Tensor:
    """Fuse query, key and value into [(heads + 2·kv)·d, ...]: per key-value head its query heads, its key, its
    value."""
    parts = [
        _check_rows(name, tensor, heads * shape.kv_heads * shape.head_dim).unflatten(0, (shape.kv_heads, -1))
        for name, tensor, heads in zip(names, tensors, _qkv_heads(shape), strict=True)
    ]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _split_qkv(fused: Tensor, shape: ModelShape) -> list[Tensor]:
    rows = [heads * shape.head_dim for heads in _qkv_heads(shape)]
    return [part.flatten(0, 1) for part in fused.unflatten(0, (shape.kv_heads, sum(rows))).split(rows, dim=1)]


def _gather_and_split(part: _Part, tensor: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of `_fuse_and_cut`, including the other ranks' parts: whole tensors in the order of the rule's
    names."""
    rule = part.rule
    if rule.cut == "replicated":
        return [tensor]
    pieces = _all_gather(tensor, _tensor_group(part))
    if rule.fuse == "gate_up":
        return [_join(list(column), 0) for column in zip(*(piece.chunk(2) for piece in pieces), strict=True)]
    whole = _join(pieces, 1 if rule.cut == "row" else 0)
    if rule.fuse == "qkv":
        return _split_qkv(whole, shape)
    return [whole[: shape.vocabulary] if rule.cut == "vocabulary" else whole]


def _join(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks of a group, in rank order."""
    size = dist.get_world_size(group)
    if size == 1:
        return [tensor]
    gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return gathered
