"""What the parts of a step cost in seconds, as functions of sizes: the model that the simulation runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class RowSize(NamedTuple):
    """A micro-batch."""

    tokens: int
    """Tokens computed."""
    squares: float
    """Sum over its responses of the squared length of prompt and response: what attention costs."""


@dataclass(frozen=True)
class Costs:
    """Seconds of one instance and one unit of the trainer in one layout. Each coefficient is ≥ 0."""

    decode_step: float
    """a: a decode step of an instance, whatever it holds."""
    decode_response: float
    """b: a decode step, for each response in flight on the instance."""
    decode_context: float
    """c: a decode step, for each token of context of all responses in flight."""
    prefill_token: float
    """The prompt of a group, per token, once."""
    window: float
    """A window: what it costs whatever is in it."""
    micro_batch: float
    """Each of its micro-batches."""
    token: float
    """Each token that it computes, frozen models' passes included."""
    square: float
    """Each squared length (`RowSize.squares`)."""
    update: float
    """An optimizer update with the reduction of the gradients."""
    sync: float
    """A weight sync, from the last gradient to instances that sample again."""
    overhead: float = 0.0
    """What else a step of the trainer takes: checks and reports."""
    verify: float = 0.0
    """The reward, from a group's last response to its verdict."""
    orchestrator_token: float = 0.0
    """The orchestrator's CPU, for each token of a response."""
    train_slowdown: float = 1.0
    """Factor of a window's time while instances sample on the same cores."""
    rollout_slowdown: float = 1.0
    """Factor of a decode step's time while the trainer computes on the same cores."""
    source: str = "given"
    """Where the coefficients come from: "given", "prior" and of which device, "measured" and in which runs."""
    exceptions: Mapping[str, str] = field(default_factory=dict)
    """Those that come from elsewhere, by name."""

    def figures(self) -> dict[str, tuple[float, str]]:
        """The coefficients that are not 0, each with its source."""
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, float) and value}
        return {name: (value, self.exceptions.get(name, self.source)) for name, value in numbers.items()}

    def decode_s(self, active: float, context: float) -> float:
        """Seconds of a decode step with so many responses in flight, of so many tokens of context together."""
        return self.decode_step + self.decode_response * active + self.decode_context * context

    def window_s(self, rows: Sequence[RowSize], pipeline: int = 1) -> float:
        """Seconds of a window of these micro-batches. Under a pipeline of p stages, each micro-batch takes a stage 1/p
        of its time, and the first p − 1 fill it (1F1B): (p − 1 + m) / (p m) of the sum."""
        work = sum(self.micro_batch + self.token * row.tokens + self.square * row.squares for row in rows)
        count = len(rows)
        return self.window + (work * (pipeline - 1 + count) / (pipeline * count) if count else 0.0)
