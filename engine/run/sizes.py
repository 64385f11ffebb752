"""Counts, for one trainer rank, its parameters and the activation elements per token that its layers keep for the
backward pass; and what an embedded instance keeps of responses."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.training import Parallel, Recompute
from engine.model.shape import Experts, ModelShape

PROMPTS_KEPT = 8
"""Size of an embedded instance's prompt cache, in full slots, and of the prompts that are admitted together. This is
enough for the groups being admitted and small compared with the slots."""
ROWS = 16
"""A deterministic embedded instance decodes a multiple of so many slots."""


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
    - The MLP keeps its gate and up projections and their product (3·f). Each of a token's experts also keeps its copy
      of the input, and the product times the router's share (h + 4·f).
    - The rotation keeps nothing, because all layers share its tables (engine.model.rotary).
    - Small statistics per token count as two elements per norm or head.
    """
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    stream = 4 * input_elements(shape, parallel)
    copied = queries if head_norms(shape) and shape.kv_heads > parallel.tensor else 0
    attention = (queries + 2 * keys) + queries + keys + queries + copied
    statistics = 2 + 2 * (shape.heads + shape.kv_heads) // parallel.tensor
    return stream + attention // parallel.tensor + statistics + _mlp(shape, parallel)


def _mlp(shape: ModelShape, parallel: Parallel) -> int:
    experts = shape.experts
    if experts is None:
        return 3 * shape.intermediate // parallel.tensor
    router = 3 * experts.count + 6 * experts.per_token
    return router + experts.per_token * (4 * experts.intermediate + shape.hidden)


def input_elements(shape: ModelShape, parallel: Parallel) -> int:
    """The elements per token of a layer's input."""
    return shape.hidden // (parallel.tensor if parallel.sequence else 1)


def cheap_elements(shape: ModelShape, parallel: Parallel) -> int:
    """The part of `layer_elements` that train.recompute = "selective" does not keep: the outputs of both norms and of
    SwiGLU, and with experts also that output times the router's share (engine.model.recompute)."""
    experts = shape.experts
    products = 2 * experts.per_token * experts.intermediate if experts else shape.intermediate // parallel.tensor
    return 2 * input_elements(shape, parallel) + products


def whole_layers(recompute: Recompute, layers: int) -> int:
    """Number of a stage's `layers` that are recomputed as a whole."""
    if isinstance(recompute, str):
        return 0
    return layers if recompute is True else min(int(recompute), layers)


def stage_elements(shape: ModelShape, parallel: Parallel, recompute: Recompute) -> int:
    """The number of elements that the layers of a stage keep per token of a rank's row. A layer that is recomputed as a
    whole keeps only its input."""
    layers = shape.layers // parallel.pipeline
    whole = whole_layers(recompute, layers)
    each = layer_elements(shape, parallel) - (cheap_elements(shape, parallel) if recompute == "selective" else 0)
    return whole * input_elements(shape, parallel) + (layers - whole) * each


def decoded_slots(slots: int, deterministic: bool) -> int:
    """The number of slots for which an embedded instance has keys and values."""
    return -(-slots // ROWS) * ROWS if deterministic else slots


def kept_slots(slots: int, conversations: bool) -> int:
    """The size of an embedded instance's prompt cache, in full slots. `conversations`: whether a rollout program's
    prompts come again with more tokens, so that as many as there are slots are kept."""
    return PROMPTS_KEPT + (slots if conversations else 0)
