"""Rotary positions of a layout: as transformers computes them, with Llama 3's scaling."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from engine.model.shape import Llama3Scaling, ModelShape


class RotaryAtPositions(torch.nn.Module):
    """Rotary embedding of the layout's positions (Megatron's own counts 0 … S−1, wrong for shared prompts).

    Takes the place of a GPTModel's `rotary_pos_emb`. Always in fp32: the frequencies are no buffer, which a cast of the
    model to bf16 would round, and follow the positions' device by themselves.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.frequencies = frequencies(shape)

    def get_rotary_seq_len(self, context: Any, transformer: Any, hidden: Any, config: Any, carried: Any) -> Tensor:  # noqa: ANN401
        """Called by GPTModel for the "length"; we hand it the positions [S] of the layout in packed_seq_params."""
        positions: Tensor = carried.layout.positions
        return positions

    def forward(self, positions: Tensor, **unused: Any) -> Tensor:  # noqa: ANN401
        """[S] positions → [S, 1, 1, d] fp32 angles in Megatron's (non-interleaved) order."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = torch.outer(positions.float(), self.frequencies)
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]


def frequencies(shape: ModelShape) -> Tensor:
    """[d/2] fp32 radians per position: theta^(−2i/d), stretched where the shape says so."""
    plain = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    return plain if shape.rope_scaling is None else stretched(plain, shape.rope_scaling)


def stretched(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1's scaling of frequencies [n].

    A wavelength that fits often into the original context stays, one that does not fit is stretched by the factor, and
    those between get a mean of both, weighted by how often they fit.
    """
    fits = scaling.original_context / (2 * math.pi / plain)  # in this order it is bit for bit what transformers computes
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((fits - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain
