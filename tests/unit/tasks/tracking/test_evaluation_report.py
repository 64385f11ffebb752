"""The line that says an evaluation."""

from tasks.tracking.evaluation_texts import describe

ROW = {
    "samples": 4, "problems": 10, "benchmark": "aime24", "truncated": 0,
    "avg_at_k": 0.5, "ci_low": 0.4, "ci_high": 0.6,
    "pass_at_k": 0.7, "pass_ci_low": 0.6, "pass_ci_high": 0.8,
}  # fmt: skip


def test_math_verify_alone_is_said_beside_the_rewards_figures():
    assert describe(ROW) == "avg@4 0.500 [0.400, 0.600], pass@4 0.700 [0.600, 0.800] on 10 problems of aime24"
    alone = {"math_verify_avg_at_k": 0.25, "math_verify_ci_low": 0.2, "math_verify_ci_high": 0.3}
    assert "math-verify alone avg@4 0.250 [0.200, 0.300], 3 responses judged differently on 10 problems" in describe(
        ROW | alone | {"math_verify_differs": 3}
    )
