"""What we need to know of a Hugging Face model folder, checked; an architecture we can't train is refused by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import BadInput

SUPPORTED = ("Qwen3ForCausalLM",)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder with RMSNorm, rotary positions and a gated SiLU MLP."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    """Positions the model was made for."""
    rope_theta: float
    norm_eps: float
    tied: bool
    """Whether the output layer is the embedding."""


def read_shape(folder: Path) -> ModelShape:
    """Read `config.json` of a Hugging Face folder. Raises BadInput for a folder that is none or not supported."""
    path = folder / "config.json"
    if not path.is_file():
        raise BadInput(f"model.path {folder}: no config.json there; expected a Hugging Face folder with config.json, "
                       "tokenizer files and *.safetensors")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:  # also of text that is not UTF-8
        raise BadInput(f"{path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path}: expected a JSON object, as transformers writes it")
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED:
        raise BadInput(f"{path}: architecture {architecture} is not supported; supported: {', '.join(SUPPORTED)}")
    _refuse_variants(path, config)
    if not list(folder.glob("*.safetensors")):
        raise BadInput(f"model.path {folder}: no *.safetensors there; other weight formats are not read (pickle is unsafe)")
    return _shape(path, architecture, config)


def _shape(path: Path, architecture: str, config: Mapping[str, Any]) -> ModelShape:
    rope = config.get("rope_parameters") or {}
    try:
        return ModelShape(
            architecture=architecture,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            context=config["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
            norm_eps=config["rms_norm_eps"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise BadInput(f"{path}: key {error} is missing") from None


def _refuse_variants(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse settings that would be computed differently from what the model was trained with."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    for name, value, wanted in (
        ("rope_type", kind, "default"),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("attention_bias", bool(config.get("attention_bias", False)), False),
        ("use_sliding_window", bool(config.get("use_sliding_window", False)), False),
    ):
        if value != wanted:
            raise BadInput(f"{path}: {name} = {value!r} is not supported for this architecture, only {wanted!r}")


def content_hash(folder: Path) -> str:
    """Hash (hex) of the configuration and weights of a model folder: the identity of a base model or reference."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
