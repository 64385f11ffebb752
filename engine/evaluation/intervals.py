"""avg@k, pass@k and maj@k with intervals. The problems are independent units; the samples of one problem are not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import TypedDict

import numpy as np

from engine.reward.scorer import LARGEST_SCORE
from engine.types import Score

CONFIDENCE = 0.95
"""Confidence of the intervals in evaluations.jsonl."""
WIDEST = 2 * LARGEST_SCORE
"""No score, and no difference of two, is beyond it. JSON has no infinity."""
ROUNDING = 1e-6
"""Relative error of a weighted sum of rewards in fp32: 0.7 + 0.2 + 0.1 may be below 1."""


class _FurtherAccuracy(TypedDict, total=False):
    pass_at_k: float
    pass_ci_low: float
    pass_ci_high: float
    maj_at_k: float
    maj_ci_low: float
    maj_ci_high: float


class Accuracy(_FurtherAccuracy):
    """Means over problems with the ends of their intervals. pass@k is present only if a problem has k scores, maj@k
    only if votes can be counted."""

    avg_at_k: float
    ci_low: float
    ci_high: float


def is_right(score: Score) -> bool:
    """Whether a response is right: as the reward says, else if its score is at least 1, up to the rounding of a sum in
    fp32. One without a score is wrong."""
    if score.excluded or score.status != "ok":
        return False
    return score.value >= 1.0 - ROUNDING if score.correct is None else score.correct


def accuracy_figures(
    k: int,
    values: Sequence[Sequence[float]],
    right: Sequence[Sequence[bool]],
    majorities: Sequence[float] | None,
) -> Accuracy:
    """avg@k, pass@k and maj@k over problems, each with its 95 % interval.

    values: the scores of each problem, at most k; pass@k leaves out problems with fewer. right: whether each response
    is right. majorities: the value of each problem's majority vote (0 … 1, `engine.evaluation.votes`); None if votes
    cannot be counted, and maj@k is then absent.
    """
    mean, low, high = _figure([statistics.fmean(row) for row in values], k)
    found: Accuracy = {"avg_at_k": mean, "ci_low": low, "ci_high": high}
    if passed := [float(any(row)) for row in right if len(row) == k]:
        found["pass_at_k"], found["pass_ci_low"], found["pass_ci_high"] = _figure(passed, k)
    if majorities is not None:
        found["maj_at_k"], found["maj_ci_low"], found["maj_ci_high"] = _figure(majorities, k)
    return found


def pass_at(samples: int, correct: int, k: int) -> float:
    """Probability that k samples of a problem, drawn without replacement, include a right one: 1 − C(n−c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (Evaluating Large Language Models Trained on Code, eq. 1).
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@{k} is not defined for {correct} correct of {samples} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_curve(k: int, right: Sequence[Sequence[bool]]) -> dict[str, float]:
    """{"1": pass@1, "2": pass@2, "4": …, k: pass@k}, as means over the problems with k scores; empty if there is none.
    right: whether each response is right. If all scores are 0 or 1, and none is missing, pass@1 equals avg@k."""
    counts = [sum(row) for row in right if len(row) == k]
    js = sorted({2**power for power in range(k.bit_length())} | {k}) if counts else []
    return {str(j): statistics.fmean(pass_at(k, correct, j) for correct in counts) for j in js}


def mean_interval(values: Sequence[float], samples: int = 1, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Interval of the mean of one value per problem; each value comes from `samples` samples.

    For values in [0, 1] it is Wilson's interval (1927) with the effective sample size of a clustered proportion (Korn
    and Graubard 1998): n_eff = n · p(1 − p) / s² · (z / t(n − 1))², where s² is the variance of the values; n_eff is at
    least n and at most n · samples. With one sample per problem n_eff = n, which is the binomial interval. n_eff is
    also n if all values are 0 or all are 1, so that the interval has a width. For other values (a user's reward) it is
    Student's t over the values.
    """
    mean = statistics.fmean(values)
    if not all(0.0 <= value <= 1.0 for value in values):
        return t_interval(values, confidence)
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    n = _effective(values, mean, samples, confidence)
    centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(max(0.0, mean * (1 - mean)) / n + z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """mean ± t(n − 1) · s / √n; ±`WIDEST` for a single value, of which nothing is known."""
    mean = statistics.fmean(values)
    n = len(values)
    if n < 2:
        return -WIDEST, WIDEST
    half = _t(n - 1, confidence) * statistics.stdev(values) / math.sqrt(n)
    return mean - half, mean + half


def _effective(values: Sequence[float], mean: float, samples: int, confidence: float) -> float:
    n = len(values)
    binomial = mean * (1 - mean)
    if samples == 1 or n < 2 or binomial <= 0:
        return float(n)
    spread = statistics.variance(values)
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    found = n * binomial / spread * (z / _t(n - 1, confidence)) ** 2 if spread > 0 else math.inf
    return min(max(found, float(n)), float(n * samples))


@lru_cache
def _t(freedom: int, confidence: float) -> float:
    """The two-sided quantile of Student's t."""
    from scipy import stats  # imported here, because it takes a second and is rarely needed

    return float(stats.t.ppf(0.5 + confidence / 2, freedom))


def _figure(values: Sequence[float], samples: int) -> tuple[float, float, float]:
    """The mean, and the ends of its interval."""
    return statistics.fmean(values), *mean_interval(values, samples)


DRAWS = 10_000
"""Number of draws for a problem's maj@k. Its standard error is at most 0.005."""


def best_of(values: Sequence[float]) -> float:
    """Expected largest of k values drawn with replacement from these k: Σ v_(i) · ((i/k)^k − ((i−1)/k)^k) over the
    values in ascending order. verl's best@k/mean estimates this value."""
    k = len(values)
    return sum(value * ((rank / k) ** k - ((rank - 1) / k) ** k) for rank, value in enumerate(sorted(values), 1))


def majority_of(counts: Sequence[int], right: int | None) -> float:
    """Mean value of the majority among k answers drawn with replacement from k, over `DRAWS` seeded draws.

    `counts`: the number of responses with each answer; `right`: the index of the right one, None if no response has it.
    The value is 1/t if the right answer is among t answers at the top. verl takes the one that was drawn first; among
    equals, each is first with the same probability.
    """
    if right is None:
        return 0.0
    total = sum(counts)
    drawn = np.random.default_rng(0).multinomial(total, np.array(counts) / total, size=DRAWS)
    top = drawn == drawn.max(axis=1, keepdims=True)
    return float((top[:, right] / top.sum(axis=1)).mean())
