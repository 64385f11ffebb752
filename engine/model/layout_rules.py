"""What a parallel layout asks of a model's sizes: checked before any process starts, and without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from engine.errors import BadInput
from engine.model.shape import ModelShape


class Sizes(Protocol):
    """The table `parallel` of the configuration, as far as the rules read it."""

    @property
    def tensor(self) -> int:
        """Ranks that share each layer's matrices."""

    @property
    def pipeline(self) -> int:
        """Stages that share the layers."""

    @property
    def expert(self) -> int:
        """Ranks that share the experts."""

    @property
    def sequence(self) -> bool:
        """Whether tensor ranks share the norms' work too."""


def check_layout(shape: ModelShape, parallel: Sizes) -> None:
    """Raise BadInput with every rule that the layout breaks for this model, by key and number.

    Rules among the sizes themselves are `engine.config.Parallel`'s. The vocabulary is filled up to what tensor ranks
    need, and tokens to what context and sequence parallelism need, so these have no rule.
    """
    broken = [
        *_tensor_rules(shape, parallel.tensor),
        *_pipeline_rules(shape, parallel.pipeline),
        *_expert_rules(shape, parallel),
    ]
    if broken:
        raise BadInput(f"the layout does not fit the model ({shape.architecture}): " + "; ".join(broken))


def _tensor_rules(shape: ModelShape, tensor: int) -> Iterator[str]:
    """Attention is cut by whole heads, MLPs by features. Experts are never cut."""
    if shape.heads % tensor:
        yield f"parallel.tensor = {tensor} does not divide its {shape.heads} attention heads"
    elif shape.kv_heads % tensor and tensor % shape.kv_heads:
        yield (
            f"parallel.tensor = {tensor} and its {shape.kv_heads} key-value heads: one must divide the other "
            "(Megatron's rule: several ranks may share a head, but not a part of one)"
        )
    elif (rows := (shape.heads + 2 * shape.kv_heads) * shape.head_dim) % tensor:  # only where ranks share a head
        yield f"parallel.tensor = {tensor} does not divide the {rows} rows of its query, key and value weights"
    dense = shape.experts is None or len(shape.experts.layers) < shape.layers
    if dense and shape.intermediate % tensor:
        yield f"parallel.tensor = {tensor} does not divide its MLPs' intermediate size {shape.intermediate}"


def _pipeline_rules(shape: ModelShape, pipeline: int) -> Iterator[str]:
    if shape.layers % pipeline:
        yield f"parallel.pipeline = {pipeline} does not divide its {shape.layers} layers"


def _expert_rules(shape: ModelShape, parallel: Sizes) -> Iterator[str]:
    if shape.experts is None:
        if parallel.expert > 1:
            yield f"parallel.expert = {parallel.expert} shares experts, of which it has none: set it to 1"
        return
    if shape.experts.count % parallel.expert:
        yield f"parallel.expert = {parallel.expert} does not divide its {shape.experts.count} experts"
    if parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"parallel.tensor = {parallel.tensor} on a model with experts needs parallel.sequence = true "
            "(Megatron's rule for training)"
        )
