"""What to do with a gradient that points where the last one did:
Gradient Alignment Control (GAC) or another, pure arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

LOW = 0.05
HIGH = 0.3
"""Default thresholds. The values were lost from our copy of the paper, whose Table 3 gives on-policy means of |c| of
0.03 to 0.07 and standard deviations of 0.06 to 0.13: unconfirmed."""

WARM_UP = 10
"""Cosines that "auto" thresholds are taken from; until then every update is made."""

Regime = Literal["safe", "project", "skip"]


def scale_of_parallel(cosine: float, low: float) -> float:
    """α = (c_low/|c|)·√((1−c²)/(1−c_low²)) (GAC eq. 4).

    With its part along the last gradient times α, a gradient has the cosine c_low with it, of c's sign.
    """
    return low / abs(cosine) * math.sqrt((1 - cosine**2) / (1 - low**2))


@dataclass
class Thresholds:
    """c_low and c_high of Algorithm 1, given or (None) taken from the first cosines of the run.

    Automatic: the mean of |c| over the first WARM_UP steps plus one and plus four of its standard deviations, at most
    0.9 and 0.95, and never below LOW and HIGH. Tiny models show on-policy cosines up to 0.6, which the paper's would
    skip.
    """

    low: float | None = LOW
    high: float | None = HIGH
    seen: list[float] = field(default_factory=list)
    """|c| of the first steps, for automatic thresholds."""

    def now(self) -> tuple[float, float] | None:
        """(c_low, c_high); None while they are still being measured."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        if len(self.seen) < WARM_UP:
            return None
        mean = statistics.fmean(self.seen)
        spread = statistics.pstdev(self.seen)
        low = min(0.9, max(LOW, mean + spread)) if self.low is None else self.low
        high = min(0.95, max(HIGH, mean + 4 * spread)) if self.high is None else self.high
        return low, max(low, high)

    def regime(self, cosine: float) -> Regime:
        """Safe if |c| ≤ c_low, skip above c_high, projection between (Algorithm 1).
        While measuring every cosine is safe."""
        found = self.now()
        if found is None:
            self.seen.append(abs(cosine))
            return "safe"
        low, high = found
        if abs(cosine) <= low:
            return "safe"
        return "project" if abs(cosine) <= high else "skip"


@dataclass(frozen=True)
class Step:
    """What a gradient control is told of a step, before clipping and Adam."""

    cosine: float
    """Of the step's gradient with the last one, both raw and whole; in [−1, 1]."""
    seen: Sequence[float]
    """The cosines of the steps before, of the whole run, oldest first (they are part of checkpoints)."""
    low: float | None
    """`algorithm.gac_low`; None for "auto"."""
    high: float | None
    """`algorithm.gac_high`; None for "auto"."""


Control = Callable[[Step], float | None]
"""→ what the gradient's part along the last one is multiplied by (1 leaves it, 0 takes it away),
or None to skip the update."""

CONTROLS: dict[str, Control] = {}
"""By the name in `algorithm.gradient_control`."""


def control(name: str) -> Callable[[Control], Control]:
    """Register a function as the gradient control of that name."""

    def register(decide: Control) -> Control:
        CONTROLS[name] = decide
        return decide

    return register


@control("measure")
def measure(step: Step) -> float | None:
    """Only the cosine is reported."""
    return 1.0


@control("gac")
def gac(step: Step) -> float | None:
    """Algorithm 1: c_low is what is left of the cosine between c_low and c_high; above, the update is skipped."""
    thresholds = Thresholds(step.low, step.high, [abs(cosine) for cosine in step.seen[:WARM_UP]])
    regime = thresholds.regime(step.cosine)
    if regime == "skip":
        return None
    found = thresholds.now()
    return scale_of_parallel(step.cosine, found[0]) if regime == "project" and found is not None else 1.0
