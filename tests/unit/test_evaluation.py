import pytest

from engine.evaluation import accuracy


def test_wilson_interval_of_a_known_case():
    # 8 of 10: Wilson 95 % interval 0.490 … 0.943 (Brown, Cai and DasGupta 2001, table 1's formula)
    found = accuracy([[1.0]] * 8 + [[0.0]] * 2)
    assert found["avg_at_k"] == pytest.approx(0.8)
    assert (found["ci_low"], found["ci_high"]) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_none_right_is_not_certain():
    found = accuracy([[0.0]] * 30)
    assert found["ci_low"] == 0.0
    assert found["ci_high"] == pytest.approx(0.1135, abs=1e-3)


def test_avg_and_pass_at_k():
    found = accuracy([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    assert found["avg_at_k"] == pytest.approx(0.5)
    assert found["pass_at_k"] == pytest.approx(2 / 3)


def test_rewards_outside_zero_and_one_have_the_normal_interval():
    found = accuracy([[-0.02], [-0.01], [1.2], [-0.01]])
    assert found["avg_at_k"] == pytest.approx(0.29)
    assert found["ci_low"] < 0 < found["ci_high"]
    assert found["ci_high"] - found["avg_at_k"] == pytest.approx(1.96 * 0.60671 / 2, rel=1e-4)
    assert found["pass_at_k"] == 0.25
