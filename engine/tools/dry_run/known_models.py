"""Sizes of public models from their published config.json, so that a recipe can be checked without the model.

Each line was compared with the published config.json, and the resulting number of parameters with the published number
(tests/unit/tools/dry_run/test_plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.config.recipe import find_file
from engine.data.hub import fetch_shape, is_model_name
from engine.data.named_models import fetch_s3_config
from engine.errors import BadInput
from engine.model.shape import Llama3Scaling, ModelShape, read_shape
from engine.run.s3 import SCHEME


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int, tied: bool = False) -> ModelShape:
    return ModelShape(
        architecture="Qwen3ForCausalLM",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        intermediate=intermediate,
        vocabulary=151936,
        context=40960,
        rope_theta=1e6,
        norm_eps=1e-6,
        tied=tied,
    )


def _qwen2_7b(context: int, rope_theta: float = 1e4) -> ModelShape:
    return ModelShape(
        architecture="Qwen2ForCausalLM",
        layers=28,
        hidden=3584,
        heads=28,
        kv_heads=4,
        head_dim=128,
        intermediate=18944,
        vocabulary=152064,
        context=context,
        rope_theta=rope_theta,
        norm_eps=1e-6,
        tied=False,
    )


_QWEN2_32B = ModelShape(
    architecture="Qwen2ForCausalLM",
    layers=64,
    hidden=5120,
    heads=40,
    kv_heads=8,
    head_dim=128,
    intermediate=27648,
    vocabulary=152064,
    context=131072,
    rope_theta=1e6,
    norm_eps=1e-5,
    tied=False,
)
_LLAMA_3B = ModelShape(
    architecture="LlamaForCausalLM",
    layers=28,
    hidden=3072,
    heads=24,
    kv_heads=8,
    head_dim=128,
    intermediate=8192,
    vocabulary=128256,
    context=131072,
    rope_theta=5e5,
    norm_eps=1e-5,
    tied=True,
    rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192),
)

KNOWN: Mapping[str, ModelShape] = {
    "Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, tied=True),
    "Qwen3-1.7B": _qwen3(28, 2048, 16, 6144, tied=True),
    "Qwen3-4B": _qwen3(36, 2560, 32, 9728, tied=True),
    "Qwen3-8B": _qwen3(36, 4096, 32, 12288),
    "Qwen3-14B": _qwen3(40, 5120, 40, 17408),
    "Qwen3-32B": _qwen3(64, 5120, 64, 25600),
    "Qwen2.5-7B": _qwen2_7b(131072, 1e6),
    "Qwen2.5-32B": _QWEN2_32B,
    "Qwen2.5-Math-7B": _qwen2_7b(4096),
    "Qwen2.5-Math-7B-32k": _qwen2_7b(
        32768
    ),  # Qwen2.5-Math-7B with a larger max_position_embeddings, for long responses
    "DeepSeek-R1-Distill-Qwen-32B": _QWEN2_32B,
    "Llama-3.2-3B": _LLAMA_3B,
    "Llama-3.2-3B-Instruct": _LLAMA_3B,
}
"""The shapes by the last part of the model's name on the Hugging Face hub, or of the folder's path."""


def shape_of(path: str) -> tuple[ModelShape, str]:
    """The shape of `model.path` and its source: config.json if the folder exists or is on S3, else the table `KNOWN`,
    else config.json on the Hugging Face hub.

    Raises BadInput for a model with none of them.
    """
    if path.startswith(SCHEME):
        return _shape_on_s3(path), "config.json on S3"
    folder = find_file(path)
    if (folder / "config.json").is_file():
        return read_shape(folder, weights=False), "config.json"
    name = folder.name.lower()
    for known, shape in KNOWN.items():
        if known.lower() == name:
            return shape, "published config.json"
    there = ""
    if is_model_name(path):
        try:
            return read_shape(fetch_shape(path), weights=False), "config.json on the hub"
        except BadInput as error:
            there = f"; {error}"
    raise BadInput(
        f"model.path = {path!r}: no config.json there, and the dry run has no sizes of {folder.name}; it knows "
        f"{', '.join(KNOWN)}. A folder with only config.json is enough{there}"
    )


@cache
def _shape_on_s3(path: str) -> ModelShape:
    """Read once per process: a plan asks for each layout."""
    with TemporaryDirectory() as folder:
        fetch_s3_config(path, Path(folder))
        try:
            return read_shape(Path(folder), weights=False)
        except BadInput as error:
            raise BadInput(str(error).replace(folder, path)) from None
