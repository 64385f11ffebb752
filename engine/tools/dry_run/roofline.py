"""Estimates the time of a trained token, and its MFU, by a roofline model. Nothing here was measured by this
project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.config import WINDOW_PER_STAGE, WINDOWS_TOGETHER, Config
from engine.config.training import Parallel, Recompute
from engine.model.flops import PEAKS, forward_flops
from engine.model.shape import ModelShape
from engine.run.memory import frozen_copies, row_tokens
from engine.run.sizes import cheap_elements, layer_elements, rank_parameters, whole_layers


@dataclass(frozen=True)
class Device:
    """Figures of one device, as published by its maker (dense bf16, no sparsity)."""

    name: str
    platform: Literal["cuda", "npu"]
    """Its value of `platform.device`."""
    flops: float
    """Peak FLOP/s in bf16."""
    bandwidth: float
    """Bytes/s of its memory."""
    memory_gib: float
    link: float
    """Bytes/s to another device of its node, one direction."""
    mesh: bool = False
    """Whether each pair of devices has its own link. Otherwise `link` is the total to all others, through a switch."""

    def to_others(self, ranks: int) -> float:
        """Bytes/s that a rank sends to the others of a group of `ranks` in a node, one direction."""
        return self.link * max(1, ranks - 1) if self.mesh else self.link


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        # HCCS: 392 GB/s over seven links of pairs, both ways
        Device(
            name="910b",
            platform="npu",
            flops=PEAKS["Ascend910B2"],
            bandwidth=1.6e12,
            memory_gib=64,
            link=28e9,
            mesh=True,
        ),
        # one of the two dies of a module: torch_npu shows each as a device
        Device(name="910c", platform="npu", flops=PEAKS["Ascend910_939"], bandwidth=1.6e12, memory_gib=64, link=196e9),
        Device(name="a100", platform="cuda", flops=PEAKS["A100"], bandwidth=2.0e12, memory_gib=80, link=300e9),
        Device(name="h100", platform="cuda", flops=PEAKS["H100"], bandwidth=3.35e12, memory_gib=80, link=450e9),
        Device(name="h20", platform="cuda", flops=PEAKS["H20"], bandwidth=4.0e12, memory_gib=96, link=450e9),
        Device(name="h200", platform="cuda", flops=PEAKS["H200"], bandwidth=4.8e12, memory_gib=141, link=450e9),
    )
}
PRODUCTS = 0.607
"""Share of the peak that large matrix products reach: 600 of 989 TFLOP/s on an H100, 215 of 354 on a die of a 910C.
This value and the shares of memory and links come from experience with these two devices; all are applied to the
others."""
ATTENTION = {"cuda": 0.45, "npu": 0.31}
"""The same share for attention. FlashAttention-2 has about 0.45 on an H100; the value for an NPU is a guess."""
READING = 0.78
"""Share of the memory's bandwidth that is reached: 2.6 of 3.35 TB/s."""
LINKS = 2 / 3
"""Share of a link's bandwidth that is reached: 300 of 450 GB/s, 130 of 196 GB/s."""
PASSES = 7.5
"""How often an element that a layer keeps is read or written outside products and attention, forward and backward:
norms, residual sums, rotation, the merge of prompt and own part, SwiGLU, each in separate passes. Chosen so that a
layer of Qwen3-8B at TP 4 takes 106 ns a token on an H100, as counted by hand from its operators."""
LOGIT_BYTES = 95
"""Bytes read and written for each logit, forward and backward (engine.model.logprobs)."""
FORWARD = 1 / 3
"""The forward pass's share of `PASSES` and `LOGIT_BYTES`."""
COLLECTIVES = (4.0, 7.5)
"""Number of all-gathers and reduce-scatters of a layer among tensor ranks, in the forward pass and in both passes. Of
the six in the backward pass (Megatron gathers inputs again), somewhat less than half are hidden behind products."""
WINDOW_S = {"cuda": 10e-3, "npu": 26e-3}
"""Seconds of host work per window, while the device idles."""
TOKEN_S = {"cuda": 0.73e-6, "npu": 1.9e-6}
"""Seconds of host work per token of a window. Packing and decoding took 0.73 µs a token on an x86 server. Kunpeng's
cores are assumed to be 2.6 times as slow."""
COPY = 8e9
"""Bytes/s from pageable host memory to the device (train.offload)."""


@dataclass(frozen=True)
class Estimate:
    """The time of a computed token of one replica, and the model FLOP utilisation (MFU), 0 to 1."""

    ns: float
    """Nanoseconds of forward and backward pass and host work, with all ranks of the replica working at once."""
    scoring_ns: float
    """Additional nanoseconds of the forward passes of frozen models."""
    mfu: float
    """Model FLOP of forward and backward pass over `ns` × the peak of the replica's devices, without recomputation."""

    @property
    def mfu_with_scoring(self) -> float:
        """The MFU if scoring passes count as overhead."""
        return self.mfu * self.ns / (self.ns + self.scoring_ns)


def estimate_training(
    shape: ModelShape,
    parallel: Parallel,
    device: Device,
    *,
    rows: int,
    visible: float,
    recompute: Recompute = False,
    scoring: int = 0,
    offload: bool = False,
) -> Estimate:
    """Estimate bf16 training of a dense model in micro-batches of `rows` tokens, each of which sees `visible` others.

    With TP = t, hidden size h and w weights in its linear maps, one layer of a rank takes for each token:

        products      2·w/t ÷ (PRODUCTS · peak); twice that backward
        attention     4·visible·heads·head_dim/t ÷ (ATTENTION · peak); 2.5 times that backward (FlashAttention-2)
        elementwise   PASSES · 2 · (elements that the layer keeps) ÷ (READING · bandwidth), both directions
        collectives   COLLECTIVES · 2·h·(t − 1)/t ÷ (LINKS · link), forward or both; each context rank's keys and values
                      go to the others, 2·kv_heads·head_dim · 2 bytes · (CP − 1)/t, three times in both directions

    The last stage adds the head: its products, and LOGIT_BYTES per logit. `recompute` adds the forward pass of the
    layers that are recomputed as a whole, or for "selective" the reading and writing of the recomputed elements.
    A micro-batch reads and writes the rank's fp32 gradients once. A pipeline of p stages takes its fullest stage's time
    × (m + p − 1)/m with m = 16·p micro-batches, those of four windows that wait, plus the host work. `scoring` forward
    passes are counted separately, and with `offload` each copies its weights to the device in every window. Left out:
    the update, weight syncs, waiting, launches of small kernels. Peak, bandwidth and link are those of `device`.

    Sources: the model FLOP are those of engine.model.flops; for 1F1B Narayanan et al. (arXiv:2104.04473
    §2.2); for the collectives Korthikanti et al. (arXiv:2205.05198 §4.2). The shares are assumptions (see each).
    """
    local = rows / parallel.context
    micro_batches = WINDOWS_TOGETHER * WINDOW_PER_STAGE * parallel.pipeline if parallel.pipeline > 1 else 1
    held = rank_parameters(shape, parallel, parallel.pipeline - 1).total
    layer = _layer_s(shape, parallel, device, visible)
    head = _head_s(shape, parallel, device)
    stage = shape.layers / parallel.pipeline

    def window_s(per_token: float) -> float:
        """Seconds of the passes of a window."""
        return per_token * local * (micro_batches + parallel.pipeline - 1)

    gradients = 8 * held / (READING * device.bandwidth)
    host = WINDOW_S[device.platform] + TOKEN_S[device.platform] * rows * micro_batches
    again = whole_layers(recompute, shape.layers // parallel.pipeline) * layer[0]
    if recompute == "selective":  # a norm reads as much as it writes, SwiGLU twice as much
        again = stage * 2 * 3 * cheap_elements(shape, parallel) / (READING * device.bandwidth)
    both = stage * layer[1] + again + head[1]
    training = window_s(both + gradients / local) + host
    copies = 2 * held / COPY if offload else 0.0
    scored = scoring * (window_s(stage * layer[0] + head[0]) + copies)
    tokens = rows * micro_batches
    ranks = parallel.tensor * parallel.pipeline * parallel.context
    model = 3 * forward_flops(shape, tokens=1, pairs=visible, scored=1)
    return Estimate(
        ns=training / tokens * 1e9,
        scoring_ns=scored / tokens * 1e9,
        mfu=model * tokens / (training * ranks * device.flops),
    )


def _layer_s(shape: ModelShape, parallel: Parallel, device: Device, visible: float) -> tuple[float, float]:
    """Seconds per token in one layer of a rank: forward pass, both passes."""
    tensor = parallel.tensor
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    weights = shape.hidden * (2 * queries + 2 * keys + 3 * shape.intermediate)
    products = 2 * weights / tensor / (PRODUCTS * device.flops)
    attention = 4 * visible * queries / tensor / (ATTENTION[device.platform] * device.flops)
    elementwise = PASSES * 2 * layer_elements(shape, parallel) / (READING * device.bandwidth)
    each = 2 * shape.hidden * (tensor - 1) / tensor / (LINKS * device.to_others(tensor)) if tensor > 1 else 0.0
    others = parallel.context - 1
    gathered = 4 * keys * others / tensor / (LINKS * device.to_others(parallel.context)) if others else 0.0
    return (
        products + attention + FORWARD * elementwise + COLLECTIVES[0] * each + gathered,
        3 * products + 3.5 * attention + elementwise + COLLECTIVES[1] * each + 3 * gathered,
    )


def _head_s(shape: ModelShape, parallel: Parallel, device: Device) -> tuple[float, float]:
    """Seconds per token in the head of a rank of the last stage: forward pass, both passes."""
    width = shape.vocabulary / parallel.tensor
    products = 2 * shape.hidden * width / (PRODUCTS * device.flops)
    logits = LOGIT_BYTES * width / (READING * device.bandwidth)
    return products + FORWARD * logits, 3 * products + logits


def estimate_run(shape: ModelShape, config: Config, device: Device) -> Estimate:
    """Estimate a run's micro-batches if all are full and all sequences have `rollout.max_context` tokens."""
    return estimate_training(
        shape,
        config.parallel,
        device,
        rows=row_tokens(config) * config.parallel.context,
        visible=config.rollout.max_context / 2,
        recompute=config.train.recompute,
        scoring=scoring_passes(config),
        offload=config.train.offload,
    )


def scoring_passes(config: Config) -> int:
    """Number of forward passes that the trainer's ranks make in addition to training: those of old policy and
    reference, and the policy's own before the first of several updates (algorithm.old_policy = "behavior")."""
    return frozen_copies(config) + (config.algorithm.old_policy == "behavior" and config.train.updates > 1)


def rows_of(shape: ModelShape, config: Config) -> dict[str, str]:
    """The estimate for each known device of `platform.device`, as rows of a table: device, MFU, time. Empty for a CPU
    and for a mixture of experts."""
    if shape.experts is not None:
        return {}
    rows = {}
    for name, device in DEVICES.items():
        if device.platform == config.platform.device:
            found = estimate_run(shape, config, device)
            rows[name] = (
                f"{found.mfu:.0%} of {device.flops / 1e12:.0f} TFLOP/s, {found.mfu_with_scoring:.0%} with the scoring "
                f"passes ({scoring_passes(config)}); {(found.ns + found.scoring_ns) / 1e3:.1f} µs a token of a replica"
            ).replace("%", " %")
    return rows
