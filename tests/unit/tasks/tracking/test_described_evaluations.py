"""Evaluations as text: what their figure is called."""

import pytest

from tasks.tracking import evaluation_texts

ROW = {
    "samples": 1,
    "avg_at_k": 0.5,
    "ci_low": 0.4,
    "ci_high": 0.6,
    "problems": 4,
    "benchmark": "sums",
    "weight_version": 0,
}


@pytest.mark.parametrize(
    ("more", "name"), [({}, "accuracy"), ({"partial_scores": 0}, "accuracy"), ({"partial_scores": 3}, "reward")]
)
def test_partial_rewards_are_no_accuracy(more, name):
    row = ROW | more
    assert evaluation_texts.describe_evaluation(row) == f"{name} avg@1 0.500 [0.400, 0.600] on 4 problems of sums"
    assert list(evaluation_texts._before_and_after([row], "")) == [f"{name} before", f"{name} after"]
