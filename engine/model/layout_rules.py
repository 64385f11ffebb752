"""Rules between a parallel layout and a model's sizes. They are checked before any process starts, and without
torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from engine.errors import BadInput
from engine.model.shape import ModelShape


class Sizes(Protocol):
    """The keys of the configuration table `parallel` that the rules read."""

    @property
    def tensor(self) -> int:
        """Number of ranks that share each layer's matrices."""

    @property
    def pipeline(self) -> int:
        """Number of stages that share the layers."""

    @property
    def expert(self) -> int:
        """Number of ranks that share the experts."""

    @property
    def sequence(self) -> bool:
        """Whether tensor ranks also share the norms' work."""


def check_layout(shape: ModelShape, parallel: Sizes, table: str = "parallel") -> None:
    """Raise BadInput, which names every rule that the layout breaks for this model, by key and number. `table`: the
    table of the keys.

    `engine.config.Parallel` checks the rules between the sizes themselves. There is no rule for the vocabulary or for
    tokens: the vocabulary is padded to a multiple of the tensor ranks, rows to the multiple that context and sequence
    parallelism need.
    """
    broken = [
        *_tensor_rules(shape, parallel.tensor, table),
        *_pipeline_rules(shape, parallel.pipeline, table),
        *_expert_rules(shape, parallel),
    ]
    if broken:
        raise BadInput(f"the layout does not fit the model ({shape.architecture}): " + "; ".join(broken))


def _tensor_rules(shape: ModelShape, tensor: int, table: str) -> Iterator[str]:
    """Rules of tensor parallelism. Attention is split by whole heads, MLPs by features. Experts are never split."""
    if shape.heads % tensor:
        yield f"{table}.tensor = {tensor} does not divide its {shape.heads} attention heads"
    elif shape.kv_heads % tensor and tensor % shape.kv_heads:
        yield (
            f"{table}.tensor = {tensor} and its {shape.kv_heads} key-value heads: one must divide the other "
            "(Megatron's rule: several ranks may share a head, but not a part of one)"
        )
    elif (rows := (shape.heads + 2 * shape.kv_heads) * shape.head_dim) % tensor:  # only where ranks share a head
        yield f"{table}.tensor = {tensor} does not divide the {rows} rows of its query, key and value weights"
    dense = shape.experts is None or len(shape.experts.layers) < shape.layers
    if dense and shape.intermediate % tensor:
        yield f"{table}.tensor = {tensor} does not divide its MLPs' intermediate size {shape.intermediate}"


def _pipeline_rules(shape: ModelShape, pipeline: int, table: str) -> Iterator[str]:
    if shape.layers % pipeline:
        yield f"{table}.pipeline = {pipeline} does not divide its {shape.layers} layers"


def _expert_rules(shape: ModelShape, parallel: Sizes) -> Iterator[str]:
    if shape.experts is None:
        if parallel.expert > 1:
            yield f"parallel.expert = {parallel.expert} shares experts, but the model has none: set it to 1"
        return
    if shape.experts.count % parallel.expert:
        yield f"parallel.expert = {parallel.expert} does not divide its {shape.experts.count} experts"
    if parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"parallel.tensor = {parallel.tensor} on a model with experts needs parallel.sequence = true "
            "(Megatron's rule for training)"
        )
