"""Builds this rank's part of the tri-model that a config describes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from engine.config import Config
from engine.model.build import Computation
from engine.model.hf_weights import load
from engine.model.shape import ModelShape, read_shape
from engine.model.tri_model import TriModel
from engine.model.weight_gradients import fusible
from engine.platform import Platform
from engine.wire.weights.hf_folder import open_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""torch's types by their names in `train.dtype` and `model.dtype`."""


def computation(config: Config, platform: Platform) -> Computation:
    """Return how models are computed on this platform, by the config."""
    device = platform.device(int(os.environ.get("LOCAL_RANK", "0")))
    dtype = DTYPES[config.train.dtype]
    return Computation(
        sequence=config.parallel.sequence,
        dtype=dtype,
        add_in_product=fusible(device, dtype),
        recompute=config.train.recompute,
        attention=platform.attention,
        device=device,
    )


def open_models(config: Config, platform: Platform) -> TriModel:
    """Load the policy, and old policy and reference where the algorithm needs them, all from `model.path`."""
    base = Path(config.model.path)
    shape = read_shape(base)
    put = partial(_load_weights, base, shape)
    return TriModel(
        shape,
        computation(config, platform),
        config.rollout.temperature,
        put,
        old=config.algorithm.old_policy == "previous",
        reference=put if config.algorithm.kl_coef > 0 else None,
        offload=config.train.offload,
    )


def _load_weights(folder: Path, shape: ModelShape, model: GPTModel) -> None:
    with open_folder(folder) as files:
        load(model, files.read, shape)
