"""avg@k, pass@k, maj@k, their intervals, and verl's best@k and maj@k, against closed forms, enumerations and simulated
coverage."""

import itertools
import math
import random
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.evaluation.intervals import (
    accuracy_figures,
    best_of,
    is_right,
    majority_of,
    mean_interval,
    pass_at,
    pass_curve,
)
from engine.types import Score


def figures(k, values, majorities=None):
    return accuracy_figures(k, values, [[value >= 1.0 for value in row] for row in values], majorities)


def test_wilson_interval_of_a_known_case():
    # 8 of 10: Wilson 95 % interval 0.490 … 0.943 (Brown, Cai and DasGupta 2001, table 1's formula)
    found = figures(1, [[1.0]] * 8 + [[0.0]] * 2)
    assert found["avg_at_k"] == pytest.approx(0.8)
    assert (found["ci_low"], found["ci_high"]) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_figures_of_a_small_case():
    found = figures(2, [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], [0.5, 0.0, 1.0])
    assert found["avg_at_k"] == pytest.approx(0.5)
    assert found["pass_at_k"] == pytest.approx(2 / 3)
    assert found["maj_at_k"] == pytest.approx(0.5)
    assert "maj_at_k" not in figures(1, [[1.0]])


def test_rewards_outside_zero_and_one_have_students_interval():
    found = figures(1, [[-0.02], [-0.01], [1.2], [-0.01]])
    assert found["avg_at_k"] == pytest.approx(0.29)
    # t(0.975, 3) = 3.18245 (tables); sample standard deviation sqrt(1.1042 / 3)
    assert found["ci_high"] - found["avg_at_k"] == pytest.approx(3.18245 * 0.606685 / 2, rel=1e-5)
    assert found["pass_at_k"] == 0.25


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(samples, data):
    correct = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    answers = [number < correct for number in range(samples)]
    subsets = list(itertools.combinations(answers, k))
    assert pass_at(samples, correct, k) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


def test_pass_at_k_of_published_form():
    # 1 - prod_{i=n-c+1}^{n} (1 - k/i), Chen et al. 2021's own program
    for n, c, k in ((200, 13, 10), (8, 3, 4), (100, 1, 100)):
        product = math.prod(1 - k / i for i in range(n - c + 1, n + 1))
        assert pass_at(n, c, k) == pytest.approx(1 - product)
    with pytest.raises(ValueError, match="not defined"):
        pass_at(8, 3, 9)


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=8, max_size=8), min_size=1, max_size=12))
def test_pass_curve_rises_from_avg_to_pass(values):
    curve = pass_curve(8, [[value == 1.0 for value in row] for row in values])
    assert list(curve) == ["1", "2", "4", "8"]
    assert list(curve.values()) == sorted(curve.values())
    found = figures(8, values)
    assert curve["1"] == pytest.approx(found["avg_at_k"])
    assert curve["8"] == pytest.approx(found["pass_at_k"])


@pytest.mark.parametrize(
    ("score", "right"),
    [
        (Score(0.7 + 0.2 + 0.1), True),  # 0.9999999999999999
        (Score(0.999), False),
        (Score(1.0, correct=False), False),
        (Score(0.3, correct=True), True),
        (Score(0.0, "timeout"), False),
        (Score(0.0, excluded=True), False),
    ],
)
def test_the_reward_says_which_response_is_right_or_else_its_score(score, right):
    assert is_right(score) == right


def test_samples_of_a_problem_count_as_korn_and_graubard_say():
    n = 4 * 0.25 / (1 / 24) * (1.959964 / 3.182446) ** 2  # of 16 samples; z and t(0.975, 3) from tables, s² = 1 / 24
    half = 1.959964 / (1 + 1.959964**2 / n) * math.sqrt(0.25 / n + 1.959964**2 / (4 * n**2))
    assert mean_interval([0.25, 0.5, 0.75, 0.5], 4) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 16))
def test_an_interval_holds_the_mean_and_shrinks_with_more_samples_only(values, samples):
    low, high = mean_interval(values, samples)
    assert 0 <= low <= statistics.fmean(values) + 1e-9
    assert statistics.fmean(values) - 1e-9 <= high <= 1
    wide_low, wide_high = mean_interval(values, 1)
    assert wide_low <= low + 1e-9
    assert high <= wide_high + 1e-9


def test_intervals_cover_the_truth_when_samples_of_a_problem_hang_together():
    """30 problems, 8 samples each, difficulties from Beta(0.5, 1.5), mean 0.25:
    95 % intervals must hold it about 95 times."""
    draw = random.Random(1)
    held = 0
    trials = 1500
    widths = []
    for _ in range(trials):
        chances = [draw.betavariate(0.5, 1.5) for _ in range(30)]
        means = [sum(draw.random() < chance for _ in range(8)) / 8 for chance in chances]
        low, high = mean_interval(means, 8)
        held += low <= 0.25 <= high
        widths.append(high - low)
    assert 0.93 <= held / trials <= 0.975
    # as if 240 independent samples it would be 0.109 wide and hold it in two of three cases; as if 30, 0.30 wide
    assert 0.17 < statistics.fmean(widths) < 0.26


@pytest.mark.parametrize("values", [[1.0, 0.0, 0.0, 0.0], [0.25, -1.0, 2.0, 0.25], [1.0], [0.0, 0.0]])
def test_best_of_k_is_the_mean_over_all_draws(values):
    draws = list(itertools.product(values, repeat=len(values)))
    assert best_of(values) == pytest.approx(sum(map(max, draws)) / len(draws))


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
