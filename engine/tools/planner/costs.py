"""The costs of the parts of a step in seconds, as functions of sizes: the model behind the simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


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
