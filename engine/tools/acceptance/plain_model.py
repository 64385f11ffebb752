"""A plainly written Qwen3, as the reference for the trainer's model: fp32, one sequence at a time, the full causal
mask.

It needs only torch, and shares no code with `engine.model`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.shape import ModelShape


def logprobs(weights: dict[str, Tensor], prompt: list[int], response: list[int], shape: ModelShape) -> Tensor:
    """[T] log-probabilities of one response's tokens. `weights` have Hugging Face's names; the embedding is tied."""
    device = weights["model.norm.weight"].device
    ids = torch.tensor(prompt + response, device=device)
    angle = torch.outer(torch.arange(len(ids), device=device).float(), frequencies(shape).to(device)).repeat(1, 2)
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(shape.layers):
        own = {
            n.removeprefix(f"model.layers.{layer}."): w
            for n, w in weights.items()
            if n.startswith(f"model.layers.{layer}.")
        }
        x = x + attention(own, norm(x, own["input_layernorm.weight"], shape.norm_eps), angle, shape)
        h = norm(x, own["post_attention_layernorm.weight"], shape.norm_eps)
        gate = h @ own["mlp.gate_proj.weight"].T
        up = h @ own["mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ own["mlp.down_proj.weight"].T
    scored = norm(x, weights["model.norm.weight"], shape.norm_eps)[len(prompt) - 1 : -1]
    logs = torch.log_softmax(scored @ weights["model.embed_tokens.weight"].T, -1)
    return logs.gather(-1, ids[len(prompt) :, None])[:, 0]


def frequencies(shape: ModelShape) -> Tensor:
    """[d/2] radians per position."""
    return shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def attention(own: dict[str, Tensor], x: Tensor, angle: Tensor, shape: ModelShape) -> Tensor:
    """Self-attention of one layer with the weights `own`: [S, hidden] → [S, hidden]."""
    q, k, v = (
        (x @ own[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, shape.head_dim)).transpose(0, 1) for n in "qkv"
    )
    q, k = (turned(norm(y, own[f"self_attn.{n}_norm.weight"], shape.norm_eps), angle) for n, y in (("q", q), ("k", k)))
    k, v = (y.repeat_interleave(shape.heads // shape.kv_heads, 0) for y in (k, v))
    hidden = torch.ones(len(x), len(x), device=x.device, dtype=torch.bool).triu(1)
    seen = (q @ k.transpose(1, 2) * shape.head_dim**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    return (seen @ v).transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Rotary positions: halves of the head as real and imaginary parts."""
    a, b = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()
