"""Compares two models on the same problems, to tell whether the difference is more than chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from engine.errors import BadInput
from engine.evaluation.intervals import CONFIDENCE, t_interval

FLIPS = 50_000
"""Number of random sign flips if the exact distribution cannot be computed. The error of the p-value is then at most
0.0045 (95 %)."""
REACH = 200_000
"""Largest Σ |d|, in units of 1/samples, whose exact distribution is computed. Integer scores may reach far more, which
takes minutes and GiB."""
CHUNK = 1_000
"""Number of flips that are computed at a time, to limit memory."""


@dataclass(frozen=True)
class Paired:
    """Difference of two models' per-problem means (ours − theirs)."""

    difference: float
    ci_low: float
    """Student's t interval over the problems' differences."""
    ci_high: float
    p_value: float
    """Two-sided p-value of the sign-flip permutation test."""
    confidence: float
    problems: int
    better: int
    """Number of problems on which our mean is higher."""
    worse: int

    @property
    def says_better(self) -> bool:
        """Whether our model is better at this confidence: a positive difference with p ≤ 1 − confidence."""
        return self.difference > 0 and self.p_value <= 1 - self.confidence + 1e-12

    def as_dict(self) -> dict[str, float]:
        """The figures as JSON."""
        return asdict(self)


def compare_paired(
    ours: Mapping[str, float], theirs: Mapping[str, float], samples: int = 1, confidence: float = CONFIDENCE
) -> Paired:
    """Compare per-problem means (prompt id → mean of `samples` scores). Raises BadInput unless both have the same
    problems."""
    if ours.keys() != theirs.keys() or not ours:
        raise BadInput(
            f"a paired comparison needs the same problems: {len(ours.keys() & theirs.keys())} are in both, "
            f"{len(ours.keys() ^ theirs.keys())} in one only"
        )
    differences = [ours[key] - theirs[key] for key in sorted(ours)]
    low, high = t_interval(differences, confidence)
    if all(0.0 <= value <= 1.0 for value in (*ours.values(), *theirs.values())):
        low = max(-1.0, low)
        high = min(1.0, high)
    return Paired(
        difference=statistics.fmean(differences),
        ci_low=low,
        ci_high=high,
        p_value=sign_flip(differences, samples),
        confidence=confidence,
        problems=len(differences),
        better=sum(value > 0 for value in differences),
        worse=sum(value < 0 for value in differences),
    )


def sign_flip(differences: Sequence[float], samples: int = 1) -> float:
    """Two-sided p-value: how often |Σ ±d| ≥ |Σ d| if the sign of each difference is a fair coin (Fisher 1935).

    It is exact if the differences are multiples of 1/samples, which holds for means of right or wrong answers, and
    their sum is not above `REACH`. Otherwise it uses `FLIPS` random flips with a fixed seed, and counts the observed
    signs as one of them.
    """
    whole = [round(value * samples) for value in differences]
    units = zip(differences, whole, strict=True)
    if sum(map(abs, whole)) <= REACH and all(math.isclose(d * samples, unit, abs_tol=1e-6) for d, unit in units):
        return _exact(whole)
    return _random(np.asarray(differences, dtype=np.float64))


def _exact(units: Sequence[int]) -> float:
    """The exact p-value, from the distribution of Σ ±u, which is built up one difference at a time."""
    steps = [abs(unit) for unit in units if unit]
    reach = sum(steps)
    chance = np.zeros(2 * reach + 1)
    chance[reach] = 1.0
    for step in steps:
        chance = 0.5 * (np.roll(chance, step) + np.roll(chance, -step))  # nothing wraps: `reach` is never exceeded
    sums = np.arange(-reach, reach + 1)
    return min(1.0, float(chance[np.abs(sums) >= abs(sum(units))].sum()))


def _random(differences: np.ndarray) -> float:
    generator = np.random.default_rng(0)
    observed = abs(float(differences.sum())) - 1e-12 * max(1.0, float(np.abs(differences).sum()))
    extreme = 1
    for _ in range(FLIPS // CHUNK):
        signs = generator.integers(0, 2, size=(CHUNK, len(differences))) * 2 - 1
        extreme += int((np.abs(signs @ differences) >= observed).sum())
    return extreme / (FLIPS + 1)
