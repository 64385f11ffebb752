"""The results of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any


@dataclass
class SimulatedStep:
    """Times of a step in seconds. Those of the trainer are replica group 0's."""

    began: float
    seconds: float = 0.0
    sync_s: float = 0.0
    wait_s: float = 0.0
    train_s: float = 0.0
    update_s: float = 0.0
    rollout_s: float = 0.0
    """From the first prompt that is sent to the last group in the table."""


@dataclass
class Simulated:
    """Times of the simulated steps, without the first."""

    steps: list[SimulatedStep]
    instances_busy: float
    """Share of the time in which an instance had responses in flight."""
    orchestrator_busy: float
    """Share of the time in which the orchestrator's core computed."""
    spans: list[dict[str, Any]] = field(default_factory=list)
    """Spans in the form of a run's trace, for the timeline page."""

    def mean(self, name: str) -> float:
        """Mean of a figure of `SimulatedStep`."""
        return fmean(getattr(step, name) for step in self.steps)

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.mean("seconds")

    @property
    def bound_by(self) -> str:
        """What a step mostly waits for: "rollout", "training", "sync" or "orchestrator"."""
        if self.orchestrator_busy > 0.9:
            return "orchestrator"
        parts = {
            "rollout": self.mean("wait_s"),
            "training": self.mean("train_s"),
            "sync": self.mean("sync_s") + self.mean("update_s"),
        }
        return max(parts, key=lambda name: parts[name])
