"""Rotary embedding at a layout's positions, computed as transformers does, with Llama 3's scaling."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import attention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.model import npu_operators
from engine.model.fusion import can_fuse, compile_once
from engine.model.shape import Llama3Scaling, ModelShape


class RotaryAtPositions(torch.nn.Module):
    """Rotary embedding at the layout's positions. Megatron's version uses positions 0 … S−1, which is wrong for shared
    prompts.

    Replaces a GPTModel's `rotary_pos_emb`. Angles are always fp32: the frequencies are not a buffer, because casting
    the model to bf16 would round it; instead they are moved to the positions' device at each call.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype = torch.float32) -> None:
        """`dtype`: dtype of the tables, the same as that of queries and keys."""
        super().__init__()
        self.frequencies = rotary_frequencies(shape)
        self.dtype = dtype

    def get_rotary_seq_len(self, context: Any, transformer: Any, hidden: Any, config: Any, carried: Any) -> Tensor:  # noqa: ANN401
        """Return the positions [S] of the layout in packed_seq_params. GPTModel asks for a length, and passes the
        result to `forward`."""
        positions: Tensor = carried.layout.positions
        return positions

    def forward(self, positions: Tensor, **unused: Any) -> Tensor:  # noqa: ANN401
        """[S] positions → [3, S, 1, 1, d] tables shared by all layers: the cosine, then the sine for the rotation and
        for its gradient, with the signs that `_turned` expects. They are rounded once instead of in every layer."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = torch.outer(positions.float(), self.frequencies)[:, None, None, :]
        cos = angles.cos()
        sin = angles.sin()
        sines = ((sin, sin), (-sin, -sin)) if npu_operators.on_npu(angles) else ((-sin, sin), (sin, -sin))
        return torch.stack([torch.cat(pair, dim=-1) for pair in ((cos, cos), *sines)]).to(self.dtype)


def install_rotary() -> None:
    """Make Megatron's attention call `rotate_positions`. Otherwise it calls Transformer Engine; under MindSpeed's
    adaptor it calls Apex, or, without Apex, mistakes the tables for angles."""
    vars(rope_utils)["fused_apply_rotary_pos_emb"] = rotate_positions  # Megatron requires one for this option
    vars(attention)["apply_rotary_pos_emb"] = _apply


def _apply(t: Tensor, tables: Tensor, config: TransformerConfig, **unused: Any) -> Tensor:  # noqa: ANN401
    return rotate_positions(t, tables, config.rotary_interleaved)


def rotate_positions(t: Tensor, tables: Tensor, interleaved: bool = False) -> Tensor:
    """Return queries or keys [S, b, heads, d], rotated by the angles of the tables [3, S, 1, 1, d], in the dtype of
    `t`.

    With halves t = (t₁, t₂): (t₁·cos − t₂·sin, t₂·cos + t₁·sin). Takes half the time of Megatron's plain operations.
    Raises ValueError for interleaved pairs.
    """
    if interleaved:
        raise ValueError("rotate_positions got interleaved = True; it rotates halves, not interleaved pairs")
    out: Tensor = _Rotate.apply(t, tables.to(t.dtype))
    return out


class _Rotate(torch.autograd.Function):
    """`rotate_positions` with its gradient: the upstream gradient, rotated by the negative angles."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, tables: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(tables)
        return _turned(t, tables[0], tables[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (tables,) = ctx.saved_tensors
        return _turned(grad, tables[0], tables[2]), None


def _turned(t: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    if npu_operators.on_npu(t):
        return npu_operators.npu_rotate(t, cos, signed_sin)
    if can_fuse(t):
        fused: Tensor = compile_once(rotate_halves)(t, cos, signed_sin)
        return fused
    return rotate_halves(t, cos, signed_sin)


def rotate_halves(t: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """t · cos + (t₂, t₁) · sin with its signs, for the halves t = (t₁, t₂)."""
    first, second = t.chunk(2, -1)
    return torch.cat([second, first], dim=-1).mul_(signed_sin).addcmul_(t, cos)


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """[d/2] fp32 radians per position: theta^(−2i/d), stretched if the shape has a scaling."""
    plain = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    return plain if shape.rope_scaling is None else stretch_frequencies(plain, shape.rope_scaling)


def stretch_frequencies(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Frequencies [n] scaled as in Llama 3.1.

    A wavelength that fits at least high_freq_factor times into the original context is unchanged. One that fits at most
    low_freq_factor times is stretched by the factor. In between, the frequency is a mean of both, weighted by how often
    the wavelength fits.
    """
    # this order of operations gives the same bits as transformers
    fits = scaling.original_context / (2 * math.pi / plain)
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    kept = ((fits - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain
