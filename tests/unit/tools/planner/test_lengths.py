import math
from statistics import fmean

import pytest

from engine.errors import BadInput
from engine.tools.planner.lengths import Lengths


def test_drawn_lengths_have_the_mean_and_the_quantile_that_were_asked_for():
    found = Lengths.drawn(mean=300, p99=1200, prompt=50, longest=100_000, count=8000)
    each = sorted(one for _, responses in found.groups for one in responses)
    assert fmean(each) == pytest.approx(300, rel=0.03)
    assert each[round(0.99 * len(each))] == pytest.approx(1200, rel=0.05)
    assert found.mean == pytest.approx(fmean(each))
    assert found.mean_prompt == 50


def test_responses_of_a_group_are_alike():
    found = Lengths.drawn(mean=300, p99=1200, prompt=50, longest=100_000, count=4000)
    logs = [[math.log(one) for one in responses] for _, responses in found.groups]
    whole = fmean(one for group in logs for one in group)
    between = fmean((fmean(group) - whole) ** 2 for group in logs)
    total = fmean((one - whole) ** 2 for group in logs for one in group)
    assert between / total == pytest.approx(0.5 + 0.5 / 8, abs=0.03)  # half of the variance is shared


@pytest.mark.parametrize(
    ("mean", "p99", "said"), [(300, 200, "must be above the mean"), (10, 1000, "at most 15.0 times")]
)
def test_figures_that_no_distribution_has_are_refused(mean, p99, said):
    with pytest.raises(BadInput, match=said):
        Lengths.drawn(mean, p99, 10, 10**6)


def test_the_lengths_of_a_run_are_those_of_its_responses_and_a_continued_one_counts_once():
    def span(group, number, tokens):
        return {
            "name": "rollout", "lane": "i", "start": 0, "end": 1, "step": 3,
            "group": group, "number": number, "prompt_tokens": 7, "tokens": tokens,
        }  # fmt: skip

    spans = [span(0, 0, 5), span(0, 1, 4), span(1, 0, 2), span(1, 1, 9), span(0, 1, 6)]
    found = Lengths.of_run(spans)
    assert sorted(found.groups) == [(7, (2, 9)), (7, (5, 10))]
    with pytest.raises(BadInput, match="the run sampled nothing"):
        Lengths.of_run([{"name": "step", "lane": "trainer", "start": 0, "end": 1, "step": 3}])


def test_steps_draw_whole_groups_and_the_seed_decides_which():
    found = Lengths(((1, (10, 10)), (2, (20, 20))), "given")
    drawn = found.draw_groups(50, 2, seed=1)
    assert set(drawn) == {(1, (10, 10)), (2, (20, 20))}
    assert drawn == found.draw_groups(50, 2, seed=1) != found.draw_groups(50, 2, seed=2)
    assert {len(responses) for _, responses in found.draw_groups(5, 3, seed=1)} == {3}
    assert found.scaled(1.5, 25).groups == ((1, (15, 15)), (2, (25, 25)))
