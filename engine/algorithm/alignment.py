"""Gradient controls: they decide how to change a step's gradient, given its cosine with the previous step's gradient.

Gradient Alignment Control (GAC) is one of them. This module does arithmetic on numbers only, without tensors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

LOW = 0.1
HIGH = 0.3
"""Default thresholds (c_low, c_high). Our copy of the paper lacks the values. Its Table 3 puts c_low between 0.092 and
0.128 (docs/algorithms.md); c_high is unconfirmed."""

WARM_UP = 10
"""Number of cosines from which "auto" thresholds are computed. Until then every update is made."""

RECENT = 20
"""Number of last steps that say whether the cosine is outside its on-policy range."""

Regime = Literal["safe", "project", "skip"]


def scale_of_parallel(cosine: float, low: float) -> float:
    """α = (c_low/|c|)·√((1−c²)/(1−c_low²)) (GAC eq. 4).

    If a gradient's component along the last gradient is multiplied by α, their cosine becomes ±c_low, with the sign of
    c.
    """
    across = max(0.0, 1 - cosine**2)  # rounding may put a cosine of parallel gradients above 1
    return low / abs(cosine) * math.sqrt(across / (1 - low**2))


@dataclass
class Thresholds:
    """c_low and c_high of Algorithm 1: given, or, if None, computed from the first cosines of the run.

    Computed: the mean of |c| over the first WARM_UP steps plus one standard deviation for c_low, plus four for c_high;
    at most 0.9 and 0.95, at least LOW and HIGH. Tiny models have on-policy cosines up to 0.6, at which the paper's
    thresholds would skip the update.
    """

    low: float | None = LOW
    high: float | None = HIGH
    seen: list[float] = field(default_factory=list)
    """|c| of the first steps, from which the thresholds are computed."""

    def now(self) -> tuple[float, float] | None:
        """Return (c_low, c_high); None until WARM_UP cosines have been seen, unless both are given."""
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
        """Return "safe" if |c| ≤ c_low, "project" up to c_high, "skip" above it (Algorithm 1). Without thresholds,
        record the cosine in `seen` and return "safe"."""
        found = self.now()
        if found is None:
            self.seen.append(abs(cosine))
            return "safe"
        low, high = found
        if abs(cosine) <= low:
            return "safe"
        return "project" if abs(cosine) <= high else "skip"


def upper_end(low: float | Literal["auto"], cosines: Sequence[float]) -> float | None:
    """Upper end of a run's on-policy range of |c|, which is c_low. `low`: `algorithm.gac_low`. `cosines`: those of the
    run so far, oldest first. None with "auto" while fewer than WARM_UP are known."""
    found = Thresholds(None if low == "auto" else low, HIGH, [abs(cosine) for cosine in cosines[:WARM_UP]]).now()
    return None if found is None else found[0]


@dataclass(frozen=True)
class Step:
    """Input of a gradient control for one step, before clipping and Adam."""

    cosine: float
    """Cosine in [−1, 1] between the whole, unchanged gradients of this step and the previous one."""
    seen: Sequence[float]
    """Cosines of all earlier steps of the run, oldest first. They are part of checkpoints."""
    low: float | None
    """`algorithm.gac_low`; None for "auto"."""
    high: float | None
    """`algorithm.gac_high`; None for "auto"."""
    skipped: int = 0
    """Consecutive updates skipped before this one."""
    most_skips: int = 1
    """`algorithm.gac_skips`: largest number of consecutive updates to skip."""


Control = Callable[[Step], float | None]
"""Step → the factor for the gradient's component along the last gradient (1 leaves it, 0 removes it), or None to skip
the update."""

CONTROLS: dict[str, Control] = {}
"""The gradient controls by name, as in `algorithm.gradient_control`."""


def control(name: str) -> Callable[[Control], Control]:
    """Decorator that registers a function as the gradient control `name`."""

    def register(decide: Control) -> Control:
        CONTROLS[name] = decide
        return decide

    return register


@control("measure")
def measure(step: Step) -> float | None:
    """Return 1: the cosine is only reported."""
    return 1.0


@control("gac")
def gac(step: Step) -> float | None:
    """GAC, Algorithm 1. A |cosine| between c_low and c_high is reduced to c_low; above c_high the update is skipped.

    After `most_skips` consecutive skips it is reduced instead. Algorithm 1 has no such bound: it compares with the
    gradient of a skipped update, so it skips a persistent direction for as long as it persists.
    """
    thresholds = Thresholds(step.low, step.high, [abs(cosine) for cosine in step.seen[:WARM_UP]])
    regime = thresholds.regime(step.cosine)
    if regime == "skip" and step.skipped < step.most_skips:
        return None
    found = thresholds.now()
    return scale_of_parallel(step.cosine, found[0]) if regime != "safe" and found is not None else 1.0
