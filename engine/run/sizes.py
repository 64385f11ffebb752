"""Counts, for one trainer rank, its parameters and the activation elements per token that its layers keep for the
backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.training import Parallel
from engine.model.shape import Experts, ModelShape


@dataclass(frozen=True)
class Parameters:
    """The number of parameters of one trainer rank."""

    shared: int
    """Parameters outside the experts; each data and context rank has a copy."""
    experts: int
    """Parameters of the experts on this rank."""

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.shared + self.experts


def total_parameters(shape: ModelShape) -> int:
    """The number of parameters of the whole model. A tied output layer counts once."""
    return rank_parameters(shape, Parallel(), 0).total


def rank_parameters(shape: ModelShape, parallel: Parallel, stage: int) -> Parameters:
    """The parameters of a rank of pipeline stage `stage` (0 …), split as in `engine.model.families`."""
    per_stage = shape.layers // parallel.pipeline
    layers = range(stage * per_stage, (stage + 1) * per_stage)
    vocabulary = -(-shape.vocabulary // parallel.tensor) * shape.hidden
    shared = 0
    experts = 0
    for layer in layers:
        shared += _attention(shape, parallel.tensor) + 2 * shape.hidden
        if shape.experts is not None and layer in shape.experts.layers:
            shared += shape.experts.count * shape.hidden
            experts += _experts(shape, shape.experts, parallel.expert)
        else:
            shared += 3 * shape.hidden * shape.intermediate // parallel.tensor
    first = stage == 0
    last = stage == parallel.pipeline - 1
    shared += vocabulary * first + shape.hidden * last
    if last and not (shape.tied and first):  # a tied output layer on another stage is a separate copy
        shared += vocabulary
    return Parameters(shared, experts)


def _attention(shape: ModelShape, tensor: int) -> int:
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    cut = shape.hidden * (queries + 2 * keys) + queries * shape.hidden
    if shape.architecture == "Qwen2ForCausalLM":
        cut += queries + 2 * keys
    return -(-cut // tensor) + (2 * shape.head_dim if head_norms(shape) else 0)


def _experts(shape: ModelShape, experts: Experts, share: int) -> int:
    return experts.count // share * 3 * shape.hidden * experts.intermediate


def head_norms(shape: ModelShape) -> bool:
    """Whether queries and keys are normalised per head."""
    return shape.architecture.startswith("Qwen3")


def layer_elements(shape: ModelShape, parallel: Parallel) -> int:
    """The number of elements that one layer keeps per token of a rank's row, without recomputation.

    They are counted from the tensors that the layers save, as in Korthikanti et al. (arXiv:2205.05198 §4.1):

    - Both norms keep their input, and the two linear layers after them keep the norms' outputs (4·h; split among the
      tensor ranks with sequence parallelism).
    - Attention keeps the joint projection, rotated queries and keys, and its output. With head norms and several
      key-value heads per rank it also keeps a copy of the queries.
    - The MLP keeps its gate and up projections and their product (3·f).
    - The rotation keeps nothing, because all layers share its tables (engine.model.rotary).
    - Small statistics per token count as two elements per norm or head.
    """
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    stream = 4 * shape.hidden // (parallel.tensor if parallel.sequence else 1)
    copied = queries if head_norms(shape) and shape.kv_heads > parallel.tensor else 0
    attention = (queries + 2 * keys) + queries + keys + queries + copied
    statistics = 2 + 2 * (shape.heads + shape.kv_heads) // parallel.tensor
    return stream + attention // parallel.tensor + statistics + _mlp(shape, parallel)


def _mlp(shape: ModelShape, parallel: Parallel) -> int:
    """The elements of the MLP. With experts, each token goes to `per_token` experts, and its input is gathered for
    each."""
    if shape.experts is None:
        return 3 * shape.intermediate // parallel.tensor
    return shape.experts.per_token * (3 * shape.experts.intermediate + 2 * shape.hidden)
