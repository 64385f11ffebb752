"""Builds this rank's part of what a config describes: the tri-model and the packing of windows."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from engine.config import Config
from engine.config.training import Parallel
from engine.model.build import Computation, build_model, row_multiple
from engine.model.hf_weights import load_weights
from engine.model.linear import can_fuse_gradients
from engine.model.shape import ModelShape, read_shape
from engine.model.tri_model import TriModel
from engine.platform import Platform
from engine.trainer.ranks.packing import Packing
from engine.trainer.ranks.rank_group import RankGroup
from engine.wire.weights.buckets import DTYPES
from engine.wire.weights.hf_folder import open_folder


def make_computation(config: Config, platform: Platform, layout: Parallel | None = None) -> Computation:
    """Return how the config has models computed on this platform. `layout`: layout of the ranks; None means the
    trainer's."""
    device = platform.device(int(os.environ.get("LOCAL_RANK", "0")))
    dtype = DTYPES[config.train.dtype]
    return Computation(
        sequence=(layout or config.parallel).sequence,
        dtype=dtype,
        add_in_product=can_fuse_gradients(device, dtype),
        recompute=config.train.recompute,
        router_dtype=DTYPES[config.train.router_dtype],
        float_head=config.model.head_dtype == "float32",
        attention=platform.attention,
        device=device,
    )


def open_models(config: Config, platform: Platform) -> TriModel:
    """Load the policy, and the old policy and the reference if the algorithm needs them, all from `model.path`. There
    is no reference here if a separate stage computes its log-probabilities."""
    base = Path(config.model.path)
    shape = read_shape(base)
    put = partial(_load_weights, base, shape)
    return TriModel(
        shape,
        make_computation(config, platform),
        config.rollout.temperature,
        put,
        old=config.algorithm.old_policy == "previous",
        reference=put if config.algorithm.kl_coef > 0 and config.reference_stage is None else None,
        offload=config.train.offload,
    )


def open_frozen(folder: Path, how: Computation) -> tuple[GPTModel, ModelShape]:
    """Load a model that is never trained from a Hugging Face folder. Return it with its shape."""
    shape = read_shape(folder)
    model = build_model(shape, how)
    _load_weights(folder, shape, model)
    return model.requires_grad_(False).eval(), shape


def packing_of(config: Config, how: Computation, ranks: RankGroup) -> Packing:
    """Return how this rank packs a window, given the config and the rank's position. `how`: how its models are
    computed."""
    return Packing(
        budget=config.train.micro_batch_tokens,
        shared_prompt=config.attention.shared_prompt,
        multiple=row_multiple(how),
        context=(parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()),
        share=(ranks.share, ranks.lockstep),
        device=how.device,
    )


def _load_weights(folder: Path, shape: ModelShape, model: GPTModel) -> None:
    with open_folder(folder) as files:
        load_weights(model, files.read_tensor, shape)
