"""The line that says an evaluation."""

from tasks.tracking.evaluation_texts import describe_evaluation

ROW = {
    "samples": 4, "problems": 10, "benchmark": "aime24", "truncated": 0,
    "avg_at_k": 0.5, "ci_low": 0.4, "ci_high": 0.6,
    "pass_at_k": 0.7, "pass_ci_low": 0.6, "pass_ci_high": 0.8,
}  # fmt: skip


def test_an_evaluation_in_one_line():
    assert (
        describe_evaluation(ROW)
        == "accuracy avg@4 0.500 [0.400, 0.600], pass@4 0.700 [0.600, 0.800] on 10 problems of aime24"
    )
