"""What a step adds up."""

import math
from dataclasses import replace

import pytest

from engine.trainer.step_metrics import RankMetrics, StepMetrics, joined_advantages
from support.groups import group


def test_figures():
    metrics = StepMetrics()
    metrics.add_wait(0.5)
    metrics.add_group(group(0, 0, rewards=(1.0, 0.0), statuses=("ok", "timeout")), (2, 2), True)
    metrics.add_wait(0.25)
    metrics.losses = [3.0, 5.0]
    metrics.mismatch_kl = 4.0
    metrics.scored_tokens = 8
    figures = StepMetrics.merged([RankMetrics(metrics, True, 2**30)], denominators=[2, 5])
    assert figures["reward_mean"] == 0.5
    assert figures["reward_std"] == 0.5
    assert figures["trained_tokens"] == 2 * (3 + 2)
    assert figures["truncated"] == 2
    assert figures["reward_timeouts"] == 1
    assert (figures["wait_first_s"], figures["wait_s"]) == (0.5, 0.75)
    assert figures["loss"] == (3 / 2 + 5 / 5) / 2  # the mean over the updates
    assert figures["mismatch_kl"] == 0.5
    assert figures["versions_seen"] == [0]
    assert figures["memory_peak_gib"] == [1.0]


def test_figures_of_several_ranks_are_sums_over_responses_and_mean_times_of_the_leaders():
    first = StepMetrics()
    second = StepMetrics()
    follower = StepMetrics()
    first.add_group(group(0, 0, rewards=(1.0, 0.0), statuses=("ok", "ok")), (2, 2), True)
    second.add_group(group(0, 0, rewards=(1.0, 1.0), statuses=("ok", "error")), (2, 2), False)
    first.losses = [1.0]
    follower.losses = [3.0]
    follower.computed_tokens = 7
    first.train_s = 1.0
    second.train_s = 3.0
    follower.train_s = 50.0
    second.worst_gap(0.5)
    figures = StepMetrics.merged(
        [RankMetrics(first, True, 1), RankMetrics(second, True, 1), RankMetrics(follower, False, 1)], [4]
    )
    assert (figures["reward_mean"], figures["reward_errors"], figures["loss"]) == (0.75, 1, 1.0)
    assert figures["equal_groups"] == 1
    assert (figures["train_s"], figures["computed_tokens"], figures["max_ratio_gap"]) == (2.0, 7, 0.5)
    follower.worst_gap(math.nan)
    assert math.isnan(
        StepMetrics.merged([RankMetrics(first, True, 1), RankMetrics(follower, False, 1)], [4])["max_ratio_gap"]
    )


def test_metrics_of_the_scores_have_mean_and_deviation_over_the_responses_of_all_ranks_that_have_them():
    first = StepMetrics()
    second = StepMetrics()
    some = group(0, 0, rewards=(1.0, 0.0, 0.0), statuses=("ok", "ok", "ok"))
    scores = [replace(one, metrics={"form": form}) for one, form in zip(some.scores, (1.0, 0.0, 9.0), strict=True)]
    scores[2] = replace(scores[2], excluded=True)
    first.add_group(replace(some, scores=tuple(scores)), (2, 2, 0), True)
    second.add_group(replace(some, scores=(*scores[:1], *some.scores[1:])), (2, 2, 0), True)
    figures = StepMetrics.merged([RankMetrics(first, True, 1), RankMetrics(second, True, 1)], [4])
    assert figures["reward_metrics"] == {"reward/form": 2 / 3, "reward/form_std": math.sqrt(2 / 9)}


def test_excluded_responses_are_counted_and_no_part_of_the_rewards_mean():
    metrics = StepMetrics()
    some = group(0, 0, rewards=(1.0, 9.0), statuses=("ok", "timeout"))
    metrics.add_group(replace(some, scores=(some.scores[0], replace(some.scores[1], excluded=True))), (2, 0), False)
    other = StepMetrics()
    other.add_group(replace(some, scores=tuple(replace(score, excluded=True) for score in some.scores)), (0, 0), False)
    ranks = [RankMetrics(metrics, True, 1), RankMetrics(other, True, 1)]
    figures = StepMetrics.merged(ranks, [4])
    assert (figures["reward_mean"], figures["reward_std"]) == (1.0, 0.0)
    assert (figures["reward_excluded"], figures["reward_timeouts"], figures["equal_groups"]) == (3, 2, 2)
    assert figures["response_length_mean"] == sum(metrics.lengths + other.lengths) / 4
    assert StepMetrics.merged(ranks[1:], [4])["reward_mean"] == 0.0


def test_nan_is_not_hidden_by_later_values():
    metrics = StepMetrics()
    for value in (0.1, math.nan, 0.2):
        metrics.worst_gap(value)
        metrics.worst_ratio(value)
        assert math.isnan(metrics.max_ratio_gap) == math.isnan(metrics.old_ratio_max) == (value != 0.1)


def test_a_response_with_tokens_of_two_versions_counts_as_continued():
    metrics = StepMetrics()
    metrics.add_group(group(5, 3, 5, rewards=(1.0, 0.0), statuses=("ok", "ok")), (2, 2), True)
    metrics.add_group(group(5, 5), (2,), True)
    figures = StepMetrics.merged([RankMetrics(metrics, True, 1)], [3])
    assert (figures["continued"], figures["versions_seen"]) == (2, [3, 5])


@pytest.mark.parametrize(
    ("lengths", "p90", "longest", "tail"),
    [([10] * 20, 10, 10, 0.1), ([1] * 18 + [41] * 2, 1, 41, 0.82), ([7], 7, 7, 1.0), ([], 0, 0, 0.0)],
)
def test_the_spread_of_lengths_is_over_the_responses_of_all_ranks(lengths, p90, longest, tail):
    halves = [StepMetrics(lengths=lengths[::2]), StepMetrics(lengths=lengths[1::2])]
    figures = StepMetrics.merged([RankMetrics(half, True, 1) for half in halves], [4])
    assert [figures[f"response_length_{name}"] for name in ("p90", "max", "tail")] == [p90, longest, tail]


def test_the_advantages_of_a_step_are_those_of_all_ranks():
    parts = [{0: {0: 1.0}, 2: {0: 0.5}}, {}, {0: {1: -1.0}}]  # of group 0, two ranks have a response each
    ranks = [RankMetrics(StepMetrics(), True, 1, part) for part in parts]
    assert joined_advantages(ranks) == {0: {0: 1.0, 1: -1.0}, 2: {0: 0.5}}


def test_means_over_responses_are_over_those_that_are_trained():
    """Of four responses one is excluded and one is cut and masked: they are in no sum, and in no count."""
    metrics = StepMetrics()
    metrics.add_group(group(0, 0, rewards=(1.0, 0.0, 0.0, 0.0), statuses=("ok",) * 4), (2, 0, 3, 0), True)
    metrics.entropy = 1.5 + 0.5
    assert StepMetrics.merged([RankMetrics(metrics, True, 1)], [4])["entropy"] == 1.0
    assert StepMetrics.merged([RankMetrics(metrics, True, 1)], [4], by_response=False)["entropy"] == 2.0 / 5
