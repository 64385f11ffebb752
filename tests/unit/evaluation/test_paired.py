"""The paired comparison against enumeration, textbook values and simulated error rates."""

import itertools
import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.evaluation.paired import compare_paired, sign_flip


def enumerated(differences):
    observed = abs(sum(differences))
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return sum(one >= observed - 1e-9 for one in sums) / len(sums)


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=10))
def test_the_exact_test_is_what_enumeration_gives(units):
    differences = [unit / 8 for unit in units]
    assert sign_flip(differences, 8) == pytest.approx(enumerated(differences))


def test_darwins_plants():
    # Fisher 1935, The Design of Experiments, §21: 15 pairs of maize, eighths of an inch; 863 of 32768 arrangements on a
    # side
    eighths = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    assert sign_flip([unit / 8 for unit in eighths], 8) == pytest.approx(2 * 863 / 32768)


def test_other_scores_are_flipped_at_random_close_to_enumeration():
    differences = [0.137, -0.052, 0.231, 0.318, -0.111, 0.273, 0.094, 0.005, 0.212, -0.083, 0.441, 0.059]
    assert sign_flip(differences, 1) == pytest.approx(enumerated(differences), abs=0.0045)
    assert sign_flip(differences, 1) == sign_flip(differences, 1)
    assert sign_flip([898838.3, 683983.9, 472142.7, -2054964.9]) == 1.0  # the sum is 0 but for rounding


@pytest.mark.parametrize("largest", [1_000, 1_000_000])
def test_large_whole_scores_take_no_longer(largest):
    draw = random.Random(0)
    differences = [draw.randint(-largest, largest) + largest / 20 for _ in range(500)]
    began = time.process_time()
    p = sign_flip(differences)
    assert time.process_time() - began < 5
    # by the normal approximation of the sum of random signs
    z = abs(sum(differences)) / math.sqrt(sum(d * d for d in differences))
    assert p == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.01)


def test_the_observed_signs_count_however_large_the_scores_are():
    differences = [1e6 + number / 7 for number in range(3)]  # no whole numbers: flipped at random
    assert sign_flip(differences) == pytest.approx(2 / 8, abs=0.0045)


def test_a_comparison_of_known_numbers():
    ours = {str(number): value for number, value in enumerate([1.0, 0.75, 0.5, 0.5, 0.25, 1.0])}
    theirs = {str(number): value for number, value in enumerate([0.5, 0.5, 0.5, 0.25, 0.0, 0.5])}
    found = compare_paired(ours, theirs, 4)
    assert found.difference == pytest.approx(1.75 / 6)
    assert found.p_value == pytest.approx(2 / 32)  # five differences, all of one sign; the sixth is 0
    # s = 0.18819, t(0.975, 5) = 2.57058
    assert (found.ci_low, found.ci_high) == pytest.approx((0.29167 - 0.19749, 0.29167 + 0.19749), abs=1e-3)
    assert (found.better, found.worse, found.problems) == (5, 0, 6)
    assert not found.says_better  # p = 0.0625
    assert compare_paired(ours, theirs, 4, confidence=0.9).says_better
    assert not compare_paired(theirs, ours, 4, confidence=0.9).says_better


def test_chance_alone_seldom_wins_and_a_real_difference_mostly_does():
    """60 problems, 4 samples: false alarms in at most 2.5 % (one side of 5 %),
    15 points more are seen in most cases."""
    draw = random.Random(3)
    wins = {0.0: 0, 0.15: 0}
    for gain, trials in ((0.0, 600), (0.15, 200)):
        for _ in range(trials):
            chances = {str(number): draw.betavariate(1, 1) * 0.8 for number in range(60)}
            theirs = {key: sum(draw.random() < chance for _ in range(4)) / 4 for key, chance in chances.items()}
            ours = {key: sum(draw.random() < chance + gain for _ in range(4)) / 4 for key, chance in chances.items()}
            wins[gain] += compare_paired(ours, theirs, 4).says_better
    assert wins[0.0] / 600 <= 0.045  # 2.5 % and three standard errors
    assert wins[0.15] / 200 >= 0.8
