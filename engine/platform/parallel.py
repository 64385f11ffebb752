"""The time in which a process is a rank: process group, Megatron's parallel state and seeds, put up and taken down."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.errors import BadInput
from engine.platform.base import Platform

TIMEOUT_S = 600.0
"""Deadline of a collective. Device collectives start when every rank has its data, so none waits for a rollout."""


@contextmanager
def session(
    platform: Platform,
    seed: int,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    expert: int = 1,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[torch.device]:
    """Be one rank of the layout, from torch elastic's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*).

    Sizes are of Megatron's groups in its default order (tp-cp-ep-dp-pp); data parallelism is what is left of the ranks.
    Yields this rank's device. Raises BadInput if the ranks can't be divided so. Collectives give up after `timeout_s`.
    """
    platform.adapt_megatron()
    device = platform.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(platform.backend, timeout=timedelta(seconds=timeout_s))
    with _ending():
        _lay_out(tensor=tensor, pipeline=pipeline, context=context, expert=expert, timeout_s=timeout_s)
        _seed(seed)
        yield device


@contextmanager
def single(platform: Platform, seed: int = 0) -> Iterator[torch.device]:
    """`session` of a process on its own, without a launcher and its environment."""
    platform.adapt_megatron()
    device = platform.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(platform.backend, store=store, rank=0, world_size=1)
        with _ending():
            _lay_out(tensor=1, pipeline=1, context=1, expert=1, timeout_s=TIMEOUT_S)
            _seed(seed)
            yield device


@contextmanager
def _ending() -> Iterator[None]:
    """Take everything down again, also after a start that failed half-way."""
    from megatron.core import parallel_state

    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _lay_out(tensor: int, pipeline: int, context: int, expert: int, timeout_s: float) -> None:
    from megatron.core import parallel_state

    ranks = dist.get_world_size()
    for sizes in (
        {"tensor": tensor, "pipeline": pipeline, "context": context},
        {"pipeline": pipeline, "expert": expert},
    ):
        product = math.prod(sizes.values())
        if ranks % product:
            text = " × ".join(f"parallel.{name} {size}" for name, size in sizes.items())
            raise BadInput(f"{text} = {product} does not divide the {ranks} ranks of the trainer")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1,  # experts are shared whole: they are small, and gloo can't gather uneven parts
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
        create_gloo_process_groups=False,
    )


def _seed(seed: int) -> None:
    """Same weights and choices on every replica; Megatron keeps streams of its own per tensor and expert rank."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
