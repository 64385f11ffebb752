"""Building the Megatron GPT model of a shape: Megatron's own layers with our core attention and rotary positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from engine.model.attention import LayoutParams, SegmentAttention, params
from engine.model.layout import Layout
from engine.model.shape import ModelShape


def transformer_config(shape: ModelShape) -> TransformerConfig:
    """Megatron's configuration for the shape, in fp32, everything fused switched off (no such kernels on CPU)."""
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        deallocate_pipeline_outputs=False,
        batch_p2p_comm=True,
        calculate_per_token_loss=True,  # leaves gradients undivided: the step's denominator is ours (contract 2)
    )


def build_model(shape: ModelShape) -> GPTModel:
    """A GPTModel with uninitialised weights (load them with `engine.model.weights`)."""
    config = transformer_config(shape)
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(),
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.context,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
        share_embeddings_and_output_weights=shape.tied,
        parallel_output=True,
    )
    model.rotary_pos_emb = RotaryAtPositions(shape.head_dim, shape.rope_theta)
    model.decoder.register_forward_hook(_keep_scored, with_kwargs=True)
    return model


def logits(model: torch.nn.Module, layout: Layout) -> Tensor:
    """[T, vocabulary] logits that score the layout's response tokens."""
    out = model(
        input_ids=layout.token_ids[None],
        position_ids=layout.positions[None],
        attention_mask=None,
        packed_seq_params=params(layout),
    )
    return out[0]


def _layer_spec() -> ModuleSpec:
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = SegmentAttention
    return spec


def _keep_scored(decoder: torch.nn.Module, args: Any, kwargs: dict[str, Any], hidden: Tensor) -> Tensor:  # noqa: ANN401
    """Only scored positions go through the output layer: [S, 1, h] → [T, 1, h]; a prompt's last is used G times."""
    if not decoder.post_process:
        return hidden
    carried: LayoutParams = kwargs["packed_seq_params"]
    assert carried.layout is not None
    return hidden.index_select(0, carried.layout.scored)


class RotaryAtPositions(torch.nn.Module):
    """Rotary embedding of the layout's positions (Megatron's own counts 0 … S−1, wrong for shared prompts)."""

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", theta ** -(torch.arange(0, dim, 2).float() / dim), persistent=False)

    def get_rotary_seq_len(self, context: Any, transformer: Any, hidden: Any, config: Any, carried: LayoutParams) -> Tensor:  # noqa: ANN401
        """Called by GPTModel for the "length"; we hand it the positions [S]."""
        assert carried.layout is not None
        return carried.layout.positions

    def forward(self, positions: Tensor, **unused: Any) -> Tensor:  # noqa: ANN401
        """[S] positions → [S, 1, 1, d] angles in Megatron's (non-interleaved) order."""
        angles = torch.outer(positions.float(), self.inv_freq)
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]
