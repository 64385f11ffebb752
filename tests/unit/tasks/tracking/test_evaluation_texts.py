"""Evaluations as text: the line that says one, and what their figure is called."""

import pytest

from engine.run.folder import RunFolder
from support.run_folders import add_line
from tasks.tracking.evaluation_texts import describe_evaluation, gain_rows

ROW = {"samples": 1, "problems": 4, "unscored_problems": 0, "benchmark": "sums", "weight_version": 0}
ROW |= {"avg_at_k": 0.5, "ci_low": 0.4, "ci_high": 0.6, "pass_at_k": 0.7, "pass_ci_low": 0.6, "pass_ci_high": 0.8}


@pytest.mark.parametrize(
    ("more", "name"), [({}, "accuracy"), ({"partial_scores": 0}, "accuracy"), ({"partial_scores": 3}, "reward")]
)
def test_partial_rewards_are_no_accuracy(tmp_path, more, name):
    assert describe_evaluation(ROW | more) == f"{name} avg@1 0.500 [0.400, 0.600] on 4 problems of sums"
    add_line(tmp_path / "evaluations.jsonl", **ROW | more)
    assert list(gain_rows(RunFolder(tmp_path))) == [f"{name} before", f"{name} after"]


def test_an_evaluation_of_several_responses_to_a_problem():
    line = "accuracy avg@4 0.500 [0.400, 0.600], pass@4 0.700 [0.600, 0.800] on 4 problems of sums"
    assert describe_evaluation(ROW | {"samples": 4}) == line


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"reward_errors": 2}, "2 responses with an error of the reward"),
        (
            {"reward_errors": 2, "reward_excluded": 3},
            "2 responses with an error of the reward; 3 responses without a score, in no figure",
        ),
        (
            {"reward_timeouts": 1, "unscored_problems": 1},
            "1 response timed out in the reward; 1 further problem without a score",
        ),
        ({"samples": 4, "incomplete_problems": 1}, "1 problem with fewer than 4 scores, not in pass@k"),
    ],
)
def test_each_kind_of_failure_is_told_by_itself(more, said):
    assert describe_evaluation(ROW | more).partition(" of sums; ")[2] == said
