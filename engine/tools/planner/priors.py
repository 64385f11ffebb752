"""Costs by arithmetic, for devices and layouts that were not measured. They are estimates: the efficiencies below are
assumptions, and only ratios between layouts of one device are used where a run was measured."""

from __future__ import annotations

from dataclasses import replace

from engine.config import Config
from engine.model.shape import ModelShape
from engine.run.memory import BYTES, frozen_copies
from engine.run.sizes import rank_parameters, total_parameters, whole_layers
from engine.tools.dry_run.roofline import Device
from engine.tools.planner.costs import Costs

TRAINING = 0.35
"""Share of the peak that matrix products of training reach (an assumption)."""
DECODING = 0.4
"""The same of decoding."""
READING = 0.7
"""Share of the memory's bandwidth that decoding and the optimizer reach (an assumption)."""
NETWORK = 25e9
"""Bytes/s between nodes, for weights and gradients (a 200 Gbit/s port)."""
LAUNCH_S = 5e-6
"""A kernel's launch."""
KERNELS = 72
"""Kernels of a layer's forward and backward pass (benchmarks/launches.py)."""
ALL_REDUCE_S = 2e-5
"""Least time of an all-reduce within a node."""
SYNC_S = 0.5
"""What a weight sync takes beside its bytes."""


def prior(shape: ModelShape, config: Config, device: Device) -> Costs:
    """Return the costs of the layout by arithmetic. All figures are of one instance and one unit of the trainer."""
    parallel = config.parallel
    total = total_parameters(shape)
    active = total - _inactive(shape)
    again = whole_layers(config.train.recompute, shape.layers // parallel.pipeline) * parallel.pipeline / shape.layers
    passes = 6 + 2 * frozen_copies(config) + 2 * again
    size = BYTES[config.train.dtype]
    heads = shape.heads * shape.head_dim
    shared = parallel.tensor * parallel.context
    tensor = config.rollout.tensor
    stage = rank_parameters(shape, parallel, 0).total
    split = parallel.data if config.train.distributed_optimizer else 1
    # two all-reduces in each layer's forward pass and two in its backward pass, of a token's hidden state
    crossing = 4 * shape.layers * shape.hidden * size * 2 * (parallel.tensor - 1) / parallel.tensor
    exchanged = crossing / device.to_others(parallel.tensor)
    reduced = 4 * stage * 2 * (parallel.data - 1) / parallel.data / NETWORK
    return Costs(
        decode_step=total * 2 / tensor / (device.bandwidth * READING)
        + 2 * shape.layers * ALL_REDUCE_S * (tensor > 1)
        + shape.layers * LAUNCH_S,
        decode_response=2 * active / tensor / (device.flops * DECODING),
        decode_context=4 * shape.layers * shape.kv_heads * shape.head_dim / tensor / (device.bandwidth * READING),
        prefill_token=2 * active / tensor / (device.flops * DECODING),
        window=KERNELS * LAUNCH_S,
        micro_batch=shape.layers * KERNELS * LAUNCH_S * (1 + frozen_copies(config) / 3),
        token=passes * active / shared / (device.flops * TRAINING) + exchanged / parallel.context,
        # scores and values of half of the keys, in a forward and a backward pass of twice its work
        square=passes / 2 * 2 * shape.layers * heads / shared / (device.flops * TRAINING),
        update=reduced + 28 * stage / split / (device.bandwidth * READING),
        sync=SYNC_S + 2 * total / NETWORK,
        launcher_token=1e-6,
        source=f"prior, {device.name}",
    )


def _inactive(shape: ModelShape) -> int:
    """Parameters that a token does not use: embeddings, and the experts that it is not sent to."""
    embedding = shape.vocabulary * shape.hidden
    if shape.experts is None:
        return embedding
    idle = shape.experts.count - shape.experts.per_token
    return embedding + len(shape.experts.layers) * idle * 3 * shape.hidden * shape.experts.intermediate


def scaled(measured: Costs, was: Costs, now: Costs) -> Costs:
    """Return measured costs for another layout: each coefficient × its prior there over its prior where it was
    measured. Those whose prior is 0 stay."""
    changed = {}
    for name, value in vars(measured).items():
        before = getattr(was, name)
        after = getattr(now, name)
        if isinstance(value, float) and before and after and name != "launcher_token":
            changed[name] = value * after / before
    return replace(measured, **changed, source=f"{measured.source}, scaled by {now.source}")


def on_cores(measured: Costs, was: Config, now: Config) -> Costs:
    """Return costs that were measured on a CPU for other numbers of cores: what is computed takes time in inverse
    proportion to the threads."""
    training = was.trainer_threads / now.trainer_threads
    sampling = was.instance_threads / now.instance_threads
    factors = dict.fromkeys(("window", "micro_batch", "token", "square", "update"), training)
    factors |= dict.fromkeys(("decode_step", "decode_response", "decode_context", "prefill_token"), sampling)
    if training == sampling == 1:
        return measured
    changed = {name: getattr(measured, name) * factor for name, factor in factors.items()}
    return replace(measured, **changed, source=f"{measured.source}, scaled by the number of cores")
