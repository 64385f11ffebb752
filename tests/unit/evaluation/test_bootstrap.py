"""verl's best@k and maj@k: against every possible draw, and against draws as verl makes them."""

import itertools
import random
from collections import Counter

import pytest

from engine.evaluation.intervals import best_of, majority_of, pass_at


@pytest.mark.parametrize("values", [[1.0, 0.0, 0.0, 0.0], [0.25, -1.0, 2.0, 0.25], [1.0], [0.0, 0.0]])
def test_best_of_k_is_the_mean_over_all_draws(values):
    draws = list(itertools.product(values, repeat=len(values)))
    assert best_of(values) == pytest.approx(sum(map(max, draws)) / len(draws))


def test_best_of_k_is_below_pass_at_k():
    """One right response among 32: pass@32 is 1, best@32 is 1 − (31/32)^32."""
    assert pass_at(32, 1, 32) == 1.0
    assert best_of([1.0] + [0.0] * 31) == pytest.approx(1 - (31 / 32) ** 32)


def test_best_of_k_is_what_a_thousand_draws_estimate():
    draw = random.Random(0)
    values = [draw.random() for _ in range(8)]
    drawn = [max(draw.choices(values, k=8)) for _ in range(1000)]
    assert best_of(values) == pytest.approx(sum(drawn) / 1000, abs=0.01)


@pytest.mark.parametrize("answers", ["AABBC", "AAB", "ABCDE", "AAAA", "AABBB"])
def test_the_majority_of_k_is_the_mean_over_all_draws(answers):
    """A is right. verl takes the answer that is drawn first among those at the top."""

    def value(drawn):
        counts = Counter(drawn)
        return float(max(counts, key=counts.get) == "A")  # Counter keeps the order in which answers were drawn

    draws = list(itertools.product(answers, repeat=len(answers)))
    counts = Counter(answers)
    found = majority_of(list(counts.values()), list(counts).index("A"))
    assert found == pytest.approx(sum(map(value, draws)) / len(draws), abs=0.02)
    assert found == majority_of(list(counts.values()), list(counts).index("A"))  # seeded
    assert majority_of(list(counts.values()), None) == 0.0
