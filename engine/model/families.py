"""The supported model families: which Hugging Face tensors make up each Megatron parameter, and how it is split.

A name is a pattern: `{layer}` is the layer's number in the whole model and `{expert}` the expert's number among all,
both from 0. Hugging Face has one tensor per expert; Megatron's parameter stacks them: [experts, …].
`engine.model.hf_weights` applies the rules in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import BadInput
from engine.model.shape import Experts, ModelShape

Cut = Literal["replicated", "column", "row", "vocabulary"]
"""How tensor ranks share a parameter. "replicated": each has all of it. "column": split by output features (first
dimension). "row": split by input features (second dimension). "vocabulary": split by tokens (first dimension), padded
with zero rows to a multiple of the tensor-parallel size."""

Fuse = Literal["plain", "qkv", "gate_up"]
"""How Hugging Face tensors form a parameter. "plain": one tensor. "qkv": for each key-value head its query heads, its
key and its value. "gate_up": each rank's part of the gate, then its part of the up projection."""


@dataclass(frozen=True)
class Rule:
    """How one kind of Megatron parameter is built from Hugging Face tensors."""

    ours: str
    """Name in Megatron."""
    theirs: tuple[str, ...]
    """Names in Hugging Face, in the order in which the tensors are fused."""
    cut: Cut = "replicated"
    fuse: Fuse = "plain"


@dataclass(frozen=True)
class Family:
    """The parameters of an architecture's layers, and the Megatron settings that it needs in addition to its sizes."""

    layer: tuple[Rule, ...]
    """Rules of all parameters of a layer."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig."""


def _in_layer(ours: str, *theirs: str, cut: Cut = "replicated", fuse: Fuse = "plain") -> Rule:
    return Rule(
        f"decoder.layers.{{layer}}.{ours}", tuple(f"model.layers.{{layer}}.{name}" for name in theirs), cut, fuse
    )


EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary")
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",))
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), "vocabulary")
TIED_OUTPUT = Rule("output_layer.weight", ("model.embed_tokens.weight",), "vocabulary")
"""Output layer of a model with a tied embedding: Megatron keeps a copy of the embedding on the last pipeline stage."""

DENSE = (
    _in_layer("input_layernorm.weight", "input_layernorm.weight"),
    _in_layer(
        "self_attention.linear_qkv.weight", *(f"self_attn.{x}_proj.weight" for x in "qkv"), cut="column", fuse="qkv"
    ),
    _in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", cut="row"),
    _in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    _in_layer("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", cut="column", fuse="gate_up"),
    _in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", cut="row"),
)
QKV_BIAS = (
    _in_layer("self_attention.linear_qkv.bias", *(f"self_attn.{x}_proj.bias" for x in "qkv"), cut="column", fuse="qkv"),
)
HEAD_NORMS = (
    _in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
EXPERTS = (
    _in_layer("mlp.router.weight", "mlp.gate.weight"),
    _in_layer(
        "mlp.experts.linear_fc1",
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
        cut="column",
        fuse="gate_up",
    ),
    _in_layer("mlp.experts.linear_fc2", "mlp.experts.{expert}.down_proj.weight", cut="row"),
)

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(DENSE),
    "Qwen2ForCausalLM": Family(DENSE + QKV_BIAS, {"add_qkv_bias": True}),
    "Qwen3ForCausalLM": Family(DENSE + HEAD_NORMS, {"qk_layernorm": True}),
    "Qwen3MoeForCausalLM": Family(DENSE + HEAD_NORMS + EXPERTS, {"qk_layernorm": True}),
}


def parameter_rules(shape: ModelShape) -> dict[str, Rule]:
    """Return the rules for all parameters of the shape, by their Megatron names (patterns)."""
    output = TIED_OUTPUT if shape.tied else OUTPUT
    return {rule.ours: rule for rule in (EMBEDDING, *_family(shape).layer, FINAL_NORM, output)}


def transformer_settings(shape: ModelShape) -> dict[str, object]:
    """Return the fields of Megatron's TransformerConfig that depend on the model."""
    sizes = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_eps,
        "add_bias_linear": False,
        "moe_token_dispatcher_type": "alltoall",  # also for dense models, because the default refuses variable lengths
    }
    mixture = _mixture(shape.experts, shape.layers) if shape.experts else {}
    return {**sizes, **_family(shape).settings, **mixture}


def _mixture(experts: Experts, layers: int) -> dict[str, object]:
    """Return the fields for a mixture of experts, routed as transformers does for Qwen3-MoE. The auxiliary loss is left
    out, because it belongs to pre-training."""
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_layer_freq": [int(layer in experts.layers) for layer in range(layers)],
        # a softmax over the chosen experts is the softmax over all, divided by the sum of the chosen ones
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }


def _family(shape: ModelShape) -> Family:
    if shape.architecture not in FAMILIES:
        raise BadInput(f"architecture {shape.architecture} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[shape.architecture]
