"""GAC's arithmetic: closed forms, regimes, automatic thresholds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithm.alignment import CONTROLS, HIGH, LOW, WARM_UP, Step, Thresholds, scale_of_parallel


@given(st.integers(0, 2**31), st.floats(0.01, 0.5), st.floats(0.51, 0.99))
def test_the_parallel_part_times_alpha_leaves_the_cosine_at_the_threshold(seed, low, cosine):
    """On vectors: eq. 4 is what makes the cosine c_low, with c's sign."""
    draw = torch.Generator().manual_seed(seed)
    last, other = torch.randn(2, 50, generator=draw, dtype=torch.float64)
    across = other - (other @ last) / (last @ last) * last
    for sign in (1, -1):
        gradient = sign * cosine * last / last.norm() + math.sqrt(1 - cosine**2) * across / across.norm()
        along = (gradient @ last) / (last @ last) * last
        turned = gradient - along + scale_of_parallel(sign * cosine, low) * along
        assert float(turned @ last / turned.norm() / last.norm()) == pytest.approx(sign * low, abs=1e-9)


def test_at_the_threshold_nothing_changes():
    assert scale_of_parallel(0.3, 0.3) == pytest.approx(1.0)


def test_regimes():
    thresholds = Thresholds(0.1, 0.3)
    found = [thresholds.regime(cosine) for cosine in (0.0, -0.1, 0.1, 0.11, -0.3, 0.31, -1.0)]
    assert found == ["safe", "safe", "safe", "project", "project", "skip", "skip"]
    assert thresholds.seen == []


def test_automatic_thresholds_come_from_the_first_steps():
    thresholds = Thresholds(None, None)
    cosines = [0.4, -0.6] * (WARM_UP // 2)
    assert [thresholds.regime(cosine) for cosine in cosines] == ["safe"] * WARM_UP  # also 0.6
    assert thresholds.now() == (pytest.approx(0.6), pytest.approx(0.9))  # mean 0.5, deviation 0.1
    assert [thresholds.regime(cosine) for cosine in (0.55, 0.7, 0.95)] == ["safe", "project", "skip"]
    assert len(thresholds.seen) == WARM_UP


def test_automatic_thresholds_have_bounds():
    calm = Thresholds(None, None, [0.0] * WARM_UP)
    wild = Thresholds(None, None, [0.9, 1.0] * (WARM_UP // 2))
    assert calm.now() == (LOW, HIGH)
    assert wild.now() == (0.9, 0.95)
    assert Thresholds(None, 0.5, [0.9] * WARM_UP).now() == (0.9, 0.9)  # nothing is projected then


@pytest.mark.parametrize("most", [1, 4])
def test_a_direction_that_persists_is_followed_after_the_most_skips(most):
    """At a cosine that stays at 0.95 Algorithm 1 alone makes no update; with a bound it makes one in most + 1, turned
    to c_low."""
    skipped = 0
    made = []
    for step in range(20):
        factor = CONTROLS["gac"](Step(0.95, [0.95] * step, 0.05, 0.3, skipped=skipped, most_skips=most))
        skipped = skipped + 1 if factor is None else 0
        if factor is not None:
            assert factor == pytest.approx(scale_of_parallel(0.95, 0.05))
            made.append(step)
    assert made == list(range(most, 20, most + 1))


def test_a_gradient_that_is_all_along_the_last_one_is_removed_and_no_error():
    for cosine in (1.0, -1.0, 1.0000001):
        assert CONTROLS["gac"](Step(cosine, [], 0.05, 0.3, skipped=1, most_skips=1)) == 0.0


def test_gac_as_a_control():
    """Safe: untouched; project: α; violation: skipped. Automatic thresholds let all of the first steps pass."""

    def decide(cosine, seen=(), low=0.1, high=0.3):
        return CONTROLS["gac"](Step(cosine, seen, low, high))

    assert decide(-0.1) == 1.0
    assert decide(-0.2) == pytest.approx(0.1 / 0.2 * math.sqrt((1 - 0.04) / (1 - 0.01)))
    assert decide(0.31) is None
    seen = [0.4, -0.6] * (WARM_UP // 2)
    assert decide(0.99, seen[:-1], None, None) == 1.0
    assert decide(0.99, seen, None, None) is None
    # the first ten count
    assert decide(0.7, [*seen, 0.0, 0.0], None, None) == pytest.approx(scale_of_parallel(0.7, 0.6))
    assert CONTROLS["measure"](Step(0.99, seen, 0.1, 0.3)) == 1.0
