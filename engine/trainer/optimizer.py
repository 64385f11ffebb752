"""Megatron's optimizer and learning-rate schedule, with the settings of the config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from engine.config import Config
from engine.wire.weights.buckets import DTYPES

EPSILON = 1e-8
"""AdamW's ε, in the denominator of its update."""


def optimizer_of(config: Config, ddp: DistributedDataParallel) -> MegatronOptimizer:
    """Return AdamW over the model's gradient buffers. All ranks build it at the same time.

    On GPUs, and on a CPU in bf16, torch's fused kernel updates the parameters without temporary tensors. On NPUs,
    MindSpeed substitutes its fused AdamW. Elsewhere torch updates one parameter at a time: updating all together would
    need temporary tensors of the size of all fp32 weights.
    """
    _clip_in_few_calls()
    train = config.train
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            bf16=train.dtype == "bfloat16",
            params_dtype=DTYPES[train.dtype],
            lr=train.learning_rate,
            min_lr=train.min_learning_rate,
            weight_decay=train.weight_decay,
            adam_beta1=train.betas[0],
            adam_beta2=train.betas[1],
            adam_eps=EPSILON,
            clip_grad=train.max_grad_norm,
            use_distributed_optimizer=train.distributed_optimizer,
        ),
        [ddp],
        use_gloo_process_groups=False,
    )
    for group in optimizer.param_groups:  # only torch's AdamW reads these
        group["foreach"] = False
        kinds = {main.device.type for main in group["params"]}
        group["fused"] = kinds == {"cuda"} or (kinds == {"cpu"} and train.dtype == "bfloat16")
    return optimizer


def _clip_in_few_calls() -> None:
    """Make Megatron compute and scale the gradient norm with one call for all parameters. Its fallback without Apex
    waits for the device once per parameter; the results are bit-identical."""
    vars(clip_grads).update(multi_tensor_applier=_of_all, l2_norm_impl=_norm, multi_tensor_scale_impl=_scale)


def _of_all(operation: Callable[..., Any], unused: Tensor, tensors: list[list[Tensor]], *arguments: Any) -> Any:  # noqa: ANN401
    return operation(tensors[0], *arguments)


def _norm(gradients: list[Tensor], per_tensor: bool) -> tuple[Tensor, None]:
    """Return the L2 norm [1] of all gradients together, on their device."""
    return torch.stack(torch._foreach_norm(gradients)).norm()[None], None


def _scale(gradients: list[Tensor], factor: float) -> None:
    if gradients:
        torch._foreach_mul_(gradients, factor)


def scheduler_of(config: Config, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return Megatron's schedule: linear warm-up over w updates, the first at 1/w of the peak, then the decay."""
    train = config.train
    updates = train.steps * train.updates
    peak = train.learning_rate
    warmup = train.warmup_steps
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=peak / warmup if warmup else 0.0,
        max_lr=peak,
        min_lr=train.min_learning_rate,
        lr_warmup_steps=max(0, warmup - 1),
        lr_decay_steps=updates,
        lr_decay_style=train.schedule,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=updates,
        wd_incr_style="constant",
        # a resumed run restores the position from its checkpoint, but these settings from its config
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    scheduler.step(increment=0)
    return scheduler


LARGEST_NORM = 1e15
"""The largest gradient norm of a rank. The squares of larger ones overflow fp32, and clipping then multiplies by 0."""


def is_sound(ddp: DistributedDataParallel) -> bool:
    """Whether this rank's gradient is finite and its norm at most `LARGEST_NORM`. One pass without temporary memory."""
    buffers = ddp.buffers + ddp.expert_parallel_buffers
    norms = torch.stack([torch.linalg.vector_norm(buffer.grad_data) for buffer in buffers])
    return bool(norms.cpu().double().norm() <= LARGEST_NORM)  # False for NaN
