"""Hugging Face ↔ Megatron weights: one declarative mapping, streamed tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import BadInput
from engine.model.shape import ModelShape

Read = Callable[[str], Tensor]
"""Looks a Hugging Face tensor up by name."""


def to_megatron(read: Read, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """(Megatron parameter name, tensor) pairs from Hugging Face tensors."""
    yield "embedding.word_embeddings.weight", read("model.embed_tokens.weight")
    for i in range(shape.layers):
        hf, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        yield ours + "input_layernorm.weight", read(hf + "input_layernorm.weight")
        yield ours + "self_attention.linear_qkv.weight", _fuse_qkv(read, hf, shape)
        yield ours + "self_attention.linear_proj.weight", read(hf + "self_attn.o_proj.weight")
        yield ours + "self_attention.q_layernorm.weight", read(hf + "self_attn.q_norm.weight")
        yield ours + "self_attention.k_layernorm.weight", read(hf + "self_attn.k_norm.weight")
        yield ours + "pre_mlp_layernorm.weight", read(hf + "post_attention_layernorm.weight")
        gate, up = read(hf + "mlp.gate_proj.weight"), read(hf + "mlp.up_proj.weight")
        yield ours + "mlp.linear_fc1.weight", torch.cat([gate, up])
        yield ours + "mlp.linear_fc2.weight", read(hf + "mlp.down_proj.weight")
    yield "decoder.final_layernorm.weight", read("model.norm.weight")
    if not shape.tied:
        yield "output_layer.weight", read("lm_head.weight")


def to_hf(read: Read, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) pairs; `read` looks Megatron names up."""
    yield "model.embed_tokens.weight", read("embedding.word_embeddings.weight")
    for i in range(shape.layers):
        hf, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        yield hf + "input_layernorm.weight", read(ours + "input_layernorm.weight")
        for name, tensor in zip("qkv", _split_qkv(read(ours + "self_attention.linear_qkv.weight"), shape), strict=True):
            yield f"{hf}self_attn.{name}_proj.weight", tensor
        yield hf + "self_attn.o_proj.weight", read(ours + "self_attention.linear_proj.weight")
        yield hf + "self_attn.q_norm.weight", read(ours + "self_attention.q_layernorm.weight")
        yield hf + "self_attn.k_norm.weight", read(ours + "self_attention.k_layernorm.weight")
        yield hf + "post_attention_layernorm.weight", read(ours + "pre_mlp_layernorm.weight")
        gate, up = read(ours + "mlp.linear_fc1.weight").chunk(2)
        yield hf + "mlp.gate_proj.weight", gate
        yield hf + "mlp.up_proj.weight", up
        yield hf + "mlp.down_proj.weight", read(ours + "mlp.linear_fc2.weight")
    yield "model.norm.weight", read("decoder.final_layernorm.weight")
    if not shape.tied:
        yield "lm_head.weight", read("output_layer.weight")


def _fuse_qkv(read: Read, hf: str, shape: ModelShape) -> Tensor:
    """Megatron keeps, per key-value head, its query heads, then its key, then its value: [heads·d + 2·kv·d, h]."""
    groups, dim, hidden = shape.kv_heads, shape.head_dim, shape.hidden
    parts = [read(f"{hf}self_attn.{name}_proj.weight").view(groups, -1, dim, hidden) for name in "qkv"]
    return torch.cat(parts, dim=1).reshape(-1, hidden)


def _split_qkv(fused: Tensor, shape: ModelShape) -> list[Tensor]:
    groups, dim, hidden = shape.kv_heads, shape.head_dim, shape.hidden
    sizes = [shape.heads // groups, 1, 1]
    parts = fused.view(groups, sum(sizes), dim, hidden).split(sizes, dim=1)
    return [part.reshape(-1, hidden) for part in parts]


def load_hf(model: torch.nn.Module, folder: Path, shape: ModelShape) -> None:
    """Copy a Hugging Face folder's weights into a Megatron model; every parameter exactly once, or BadInput."""
    targets = dict(model.named_parameters())
    with open_hf(folder) as files, torch.no_grad():
        for name, tensor in to_megatron(files.read, shape):
            target = targets.pop(name)
            if target.shape != tensor.shape:
                raise BadInput(f"{folder}: tensor for {name} is {list(tensor.shape)}, expected {list(target.shape)}")
            target.copy_(tensor)
    assert not targets, f"parameters without a mapping: {sorted(targets)}"


class open_hf:  # noqa: N801
    """All safetensors of a folder, opened lazily and read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> open_hf:
        try:
            self.files = [safe_open(path, framework="pt") for path in sorted(self.folder.glob("*.safetensors"))]
        except SafetensorError as error:
            raise BadInput(f"{self.folder}: damaged safetensors file: {error}") from None
        self.where = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118
        return self

    def __exit__(self, *error: object) -> None:
        self.where.clear()
        self.files.clear()

    def read(self, name: str) -> Tensor:
        """The tensor of that name in fp32."""
        if name not in self.where:
            raise BadInput(f"{self.folder}: tensor {name} is missing")
        return self.where[name].get_tensor(name).float()
