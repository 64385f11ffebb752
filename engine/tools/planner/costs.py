"""The costs of the parts of a step in seconds, as functions of sizes: the model behind the simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from engine.model.flops import PEAKS


class RowSize(NamedTuple):
    """A micro-batch."""

    tokens: int
    """Number of tokens computed."""
    squares: float
    """Sum over its responses of the squared length of prompt and response, to which the cost of attention is
    proportional."""


@dataclass(frozen=True)
class Costs:
    """Seconds of one instance and one replica group of the trainer in one layout. Each coefficient is ≥ 0."""

    decode_step: float
    """a: a decode step of an instance, whatever its load."""
    decode_response: float
    """b: a decode step, per response in flight on the instance."""
    decode_context: float
    """c: a decode step, per token of context of all responses in flight."""
    prefill_token: float
    """The prompt of a group, per token, once."""
    window: float
    """A window, whatever its content."""
    micro_batch: float
    """Per micro-batch of the window."""
    token: float
    """Per token that the window computes, including the passes of frozen models."""
    square: float
    """Per squared length (`RowSize.squares`)."""
    update: float
    """An optimizer update, including the reduction of the gradients."""
    sync: float
    """A weight sync, from the last gradient until instances sample again."""
    overhead: float = 0.0
    """The rest of a trainer's step: checks and reports."""
    verify: float = 0.0
    """The reward, from a group's last response to its verdict."""
    orchestrator_token: float = 0.0
    """The orchestrator's CPU, per token of a response."""
    train_slowdown: float = 1.0
    """Factor of a window's time while instances sample on the same cores."""
    rollout_slowdown: float = 1.0
    """Factor of a decode step's time while the trainer computes on the same cores."""
    source: str = "given"
    """Source of the coefficients: "given", "prior" with the device, or "measured" with the runs."""
    exceptions: Mapping[str, str] = field(default_factory=dict)
    """The source of each coefficient that has another one, by name."""

    def slowed(self, decoding: float, training: float) -> Costs:
        """The costs of instances and of a trainer whose computations take so many times as long."""
        factors = dict.fromkeys(("decode_step", "decode_response", "decode_context", "prefill_token"), decoding)
        factors |= dict.fromkeys(("window", "micro_batch", "token", "square"), training)
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})

    def figures(self) -> dict[str, tuple[float, str]]:
        """The coefficients that are not 0, each with its source."""
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, float) and value}
        return {name: (value, self.exceptions.get(name, self.source)) for name, value in numbers.items()}

    def decode_s(self, active: float, context: float) -> float:
        """Seconds of a decode step with `active` responses in flight that have `context` tokens together."""
        return self.decode_step + self.decode_response * active + self.decode_context * context

    def window_s(self, rows: Sequence[RowSize], pipeline: int = 1) -> float:
        """Seconds of a window of these micro-batches. In a pipeline of p stages, each micro-batch takes 1/p of its time
        per stage, and the first p − 1 fill the pipeline (1F1B): (p − 1 + m) / (p m) of the sum."""
        work = sum(self.micro_batch + self.token * row.tokens + self.square * row.squares for row in rows)
        count = len(rows)
        return self.window + (work * (pipeline - 1 + count) / (pipeline * count) if count else 0.0)


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
    """As torch reports it."""
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
            memory_gib=60.9,
            link=28e9,
            mesh=True,
        ),
        # one of the two dies of a module: torch_npu shows each as a device
        Device(
            name="910c", platform="npu", flops=PEAKS["Ascend910_939"], bandwidth=1.6e12, memory_gib=60.9, link=196e9
        ),
        Device(name="a100", platform="cuda", flops=PEAKS["A100"], bandwidth=2.0e12, memory_gib=79.1, link=300e9),
        Device(name="h100", platform="cuda", flops=PEAKS["H100"], bandwidth=3.35e12, memory_gib=79.1, link=450e9),
        Device(name="h20", platform="cuda", flops=PEAKS["H20"], bandwidth=4.0e12, memory_gib=95.0, link=450e9),
        Device(name="h200", platform="cuda", flops=PEAKS["H200"], bandwidth=4.8e12, memory_gib=139.8, link=450e9),
    )
}
COPY = 8e9
"""Bytes/s from pageable host memory to a device (train.offload)."""
