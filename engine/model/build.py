"""Builds the Megatron GPT model of a shape: Megatron's layers with our core attention, norms and rotary embedding.

The sizes of the parallel layout come from Megatron's parallel state; `Computation` holds all other settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from engine.model import linear, recompute, rotary, routing
from engine.model.attention import LayoutParams, SegmentAttention, attention_params
from engine.model.experts import GroupedExperts
from engine.model.families import transformer_settings
from engine.model.hf_weights import padded_vocabulary
from engine.model.layout import Layout
from engine.model.logprobs import token_logprobs
from engine.model.norm import HeadNorm, RMSNorm, add_in_norm, add_to_made
from engine.model.rotary import RotaryAtPositions
from engine.model.shape import ModelShape
from engine.model.swiglu import SwiGLU


@dataclass(frozen=True)
class Computation:
    """How a model is computed."""

    sequence: bool = False
    """Whether to use sequence parallelism in addition to tensor parallelism."""
    dtype: torch.dtype = torch.float32
    recompute: bool | int | str = False
    """What is dropped and recomputed in the backward pass: the activations inside each layer (True), inside the first N
    layers of a pipeline stage (N, Megatron's method "block"), or large and cheap ones of each layer ("selective",
    `engine.model.recompute`)."""
    router_dtype: torch.dtype = torch.float32
    """Type of the router logits of a mixture of experts: float32, or `dtype`."""
    float_head: bool = False
    """Whether the logits of a bf16 model are kept in fp32 (`linear.output_product`)."""
    attention: str = "cpu"
    """Attention kernel, a key of `engine.model.kernels.KERNELS`."""
    device: torch.device = torch.device("cpu")
    add_in_product: bool = False
    """Whether the product of a weight gradient adds directly to Megatron's fp32 buffer. This needs a model wrapped by
    Megatron's DistributedDataParallel, which has that buffer, and `linear.can_fuse_gradients`."""


def transformer_config(shape: ModelShape, computation: Computation) -> TransformerConfig:
    """Return Megatron's configuration of the shape in the current layout, with Transformer Engine's fusions off.

    This also installs our rotation as Megatron's fused one (`rotary.install_rotary`).
    """
    rotary.install_rotary()
    if computation.add_in_product:
        linear.install_fused_gradients()
    return TransformerConfig(
        **transformer_settings(shape),
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        sequence_parallel=computation.sequence,
        bf16=computation.dtype is torch.bfloat16,
        params_dtype=computation.dtype,
        pipeline_dtype=computation.dtype,
        moe_router_dtype="fp32" if computation.router_dtype is torch.float32 else None,
        **_whole_layers(computation.recompute),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,  # makes Megatron take the activation of the layer specification
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=True,
        gradient_accumulation_fusion=computation.add_in_product,
        persist_layer_norm=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        variable_seq_lengths=True,
        deallocate_pipeline_outputs=False,
        batch_p2p_comm=True,
        cuda_graph_scope=[],  # Megatron warns about its own default
        calculate_per_token_loss=True,  # leaves gradients undivided: we divide them by the step's denominator
    )


def _whole_layers(recompute: bool | int | str) -> dict[str, Any]:
    """Return Megatron's settings for layers that are recomputed as a whole."""
    if not recompute or isinstance(recompute, str):
        return {}
    method, layers = ("uniform", 1) if recompute is True else ("block", recompute)
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def build_model(shape: ModelShape, computation: Computation | None = None) -> GPTModel:
    """Return this rank's part of the model, with uninitialised weights (`engine.model.hf_weights` loads them)."""
    computation = computation or Computation()
    config = transformer_config(shape, computation)
    tensor = config.tensor_model_parallel_size
    model = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(config, computation.attention),
        vocab_size=padded_vocabulary(shape, tensor),
        max_sequence_length=shape.context,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
        share_embeddings_and_output_weights=shape.tied,
        parallel_output=True,
    )
    model.rotary_pos_emb = RotaryAtPositions(shape, computation.dtype)
    if model.post_process:
        model.decoder.register_forward_hook(_keep_scored, with_kwargs=True)
        model.output_layer.forward = _keep_hidden
        model.vocabulary = shape.vocabulary
        model.wide_logits = computation.float_head
    if computation.recompute == "selective":
        recompute.install_recompute(model)
    if shape.experts:
        routing.install_routing(model, shape.experts)
    _mark_cuts(model)
    if computation.device.type == "cpu":
        linear.install_linear(model)
    return model.to(computation.device)


def _mark_cuts(model: GPTModel) -> None:
    """Mark the weights that are split over tensor ranks. Megatron does this when it initialises weights, which we skip.

    Without the marks the gradient norm would count only the first rank's part.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            set_tensor_model_parallel_attributes(weight, True, int(isinstance(module, RowParallelLinear)), 1)


def compute_hidden(model: torch.nn.Module, layout: Layout) -> Tensor:
    """Run a forward pass. On the last pipeline stage return the [T, hidden] states that score the layout's response
    tokens (`target_logprobs`), on the others those of all its rows."""
    out = model(
        input_ids=layout.token_ids[None],
        position_ids=layout.positions[None],
        attention_mask=None,
        packed_seq_params=attention_params(layout),
    )
    return out.squeeze(0) if parallel_state.is_pipeline_last_stage() else out


def target_logprobs(
    model: GPTModel, hidden: Tensor, layout: Layout, temperature: float, entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return `token_logprobs` of the layout's response tokens: log-probabilities and entropies [T]. `hidden`: the
    result of `compute_hidden` on the last pipeline stage. Collective over the tensor-parallel group."""
    return token_logprobs(
        hidden,
        output_weight(model),
        layout.targets,
        temperature,
        vocabulary=model.vocabulary,
        wide=model.wide_logits,
        entropy=entropy,
    )


def output_weight(model: GPTModel) -> Tensor:
    """Return the output layer's weight [vocabulary/tensor, hidden] on the last pipeline stage, which may be that of the
    embedding."""
    tied = model.share_embeddings_and_output_weights
    weight: Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return weight


def row_multiple(computation: Computation) -> int:
    """Return the number that must divide a row's length in the current parallel layout, because sequence and context
    parallelism split rows evenly."""
    context = parallel_state.get_context_parallel_world_size()
    tensor = parallel_state.get_tensor_model_parallel_world_size() if computation.sequence else 1
    return tensor * (2 * context if context > 1 else 1)


def _block_spec(config: TransformerConfig, attention: str) -> TransformerBlockSubmodules:
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        parts.self_attn_bda = add_in_norm
        parts.mlp_bda = add_to_made
        mlp = parts.mlp.submodules
        if not isinstance(mlp, MLPSubmodules):
            mlp.experts.module = GroupedExperts
            mlp = mlp.experts.submodules
        mlp.activation_func = SwiGLU
        inner = parts.self_attention.submodules
        inner.core_attention = ModuleSpec(module=SegmentAttention, params={"kernel": attention})
        if inner.q_layernorm is not IdentityOp:
            inner.q_layernorm = inner.k_layernorm = HeadNorm
    return block


def _keep_scored(decoder: TransformerBlock, args: Any, kwargs: dict[str, Any], hidden: Tensor) -> Tensor:  # noqa: ANN401
    """Forward hook that keeps only the positions whose logits are needed: [S, 1, h] → [T, 1, h]. A prompt's last
    position occurs once for each of its responses."""
    carried: LayoutParams = kwargs["packed_seq_params"]
    assert carried.layout is not None
    if decoder.config.sequence_parallel:
        # from here on the rows, and so their gradients, are the same on all tensor ranks
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return hidden.index_select(0, carried.layout.scored)


def _keep_hidden(hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:  # noqa: ANN401
    """Replaces the output layer's forward pass, because its product belongs to `token_logprobs`."""
    return hidden, None
