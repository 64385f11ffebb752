import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.reward.scorer import LONGEST_NAME
from tasks.tracking.mirror import evaluation_figures, figure_name, figure_of, metric_name, metric_values


def test_figures_of_a_row():
    row = {
        "step": 3,
        "loss": 0.5,
        "versions_seen": [2, 3],
        "none": [],
        "text": "x",
        "flag": True,
        "skipped": {"too long": 4},
    }
    assert metric_values(row) == {
        "loss": 0.5,
        "versions_seen_count": 2.0,
        "versions_seen_min": 2.0,
        "versions_seen_max": 3.0,
        "none_count": 0.0,
        "flag": 1.0,
        "skipped/too long": 4.0,
    }


@given(st.sets(st.text("ab@:/_ -.", min_size=1, max_size=6), min_size=2))
@example({"aime@24", "aime_24", "aime:24"})
@example({"a" * 300, "a" * 300 + "b", "a" * 101})
def test_names_of_different_texts_are_different_and_mlflow_takes_them(texts):
    names = list(map(metric_name, texts))
    assert len(set(names)) == len(texts)
    assert not any(re.search(r"[^\w.\- ]", name) for name in names)
    longest = {"samples": 1, "benchmark": max(texts, key=len)}
    assert len(figure_name(longest, f"reward/{'y' * LONGEST_NAME}_std")) <= 250  # MLflow's limit
    assert metric_name("my set-1.0_b") == "my set-1.0_b"


@pytest.mark.parametrize("benchmark", ["sums", "reward", "system", "a b+c", "x/avg_at_k.v2"])
def test_no_figure_of_an_evaluation_has_the_name_of_another_or_of_a_step(benchmark):
    own = {"avg_at_k": 0.5, "ci_low": 0.4, "pass_ci_low": 0.6, "reward/avg_at_k": 3.0, "pass_curve": {"1": 0.1}}
    found = evaluation_figures({"benchmark": benchmark, "samples": 2, **own})
    assert (
        not found.keys()
        & metric_values({"reward/avg_at_2": 1.0, "reward/avg_at_k": 1.0, "system/avg_at_2": 1.0}).keys()
    )
    parts = {figure_of(name) for name in found}
    assert {figure for _, figure in parts} == {"samples", *own.keys() - {"pass_curve"}, "pass_curve/1"}
    assert len({part for part, _ in parts}) == 1
    assert figure_of("reward/avg_at_2") == figure_of("loss") == ("", "")
