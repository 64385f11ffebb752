"""Makes a process a rank for a while: sets up process group, Megatron's parallel state and seeds, and tears them
down."""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.errors import BadInput
from engine.platform.base import Platform

STORE = "METRONOME_RANKS_STORE"
"""Environment variable with the file through which the ranks of one node meet. It is in a folder that only its owner
can read: a store behind a port would serve every process of the machine. Unset with several nodes, whose ranks meet at
MASTER_ADDR."""
TIMEOUT_S = 600.0
"""Seconds after which a collective gives up. Device collectives start once every rank has its data, so none waits for a
rollout."""


@contextmanager
def parallel_session(
    platform: Platform,
    seed: int,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    expert: int = 1,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[torch.device]:
    """Make this process a rank of the layout within the block, using torch elastic's environment (RANK, WORLD_SIZE,
    LOCAL_RANK, and STORE or MASTER_*).

    The sizes are those of Megatron's groups in its default order (tp-cp-ep-dp-pp). The number of data-parallel replicas
    follows from the number of ranks. Yields this rank's device. Raises BadInput if the sizes do not divide the number
    of ranks. Collectives give up after `timeout_s` seconds.
    """
    platform.adapt_megatron()
    device = platform.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=timeout_s)
    if file := os.environ.get(STORE):
        world = int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(file, world)
        rank = int(os.environ["RANK"])
        dist.init_process_group(platform.backend, timeout=timeout, store=store, rank=rank, world_size=world)
    else:
        dist.init_process_group(platform.backend, timeout=timeout)
    with _taking_down():
        _initialize_groups(tensor=tensor, pipeline=pipeline, context=context, expert=expert, timeout_s=timeout_s)
        _seed(seed)
        yield device


@contextmanager
def single_session(platform: Platform, seed: int = 0) -> Iterator[torch.device]:
    """`parallel_session` for a single process, without an orchestrator and its environment."""
    platform.adapt_megatron()
    device = platform.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(platform.backend, store=store, rank=0, world_size=1)
        with _taking_down():
            _initialize_groups(tensor=1, pipeline=1, context=1, expert=1, timeout_s=TIMEOUT_S)
            _seed(seed)
            yield device


@contextmanager
def _taking_down() -> Iterator[None]:
    """Tear down the process groups at the end of the block, even after a start that failed half-way."""
    from megatron.core import parallel_state

    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _initialize_groups(tensor: int, pipeline: int, context: int, expert: int, timeout_s: float) -> None:
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
        expert_tensor_parallel_size=1,  # ranks hold whole experts: they are small, and gloo can't gather uneven parts
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
        create_gloo_process_groups=False,
    )


def _seed(seed: int) -> None:
    """Seed Python's and torch's random streams identically on every replica. Megatron adds separate streams for tensor
    and expert ranks."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
