"""The figures that ranks add up during a step, and the report built from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any

import msgspec

from engine.schedule import response_staleness
from engine.trainer.micro_batches import trained_tokens
from engine.types import Group, LengthSpread, OptionalFigures, TrainingFigures

TIMES = ("train_s", "score_s", "wait_first_s", "wait_s")


@dataclass
class StepMetrics:
    """One rank's sums over a step.

    If several ranks hold the same tokens, only one adds them: `leader`, `feeds` and `judges` of `RankGroup` tell which.
    """

    rewards: list[float] = field(default_factory=list)
    """Rewards of the responses that are not excluded."""
    excluded: int = 0
    reward_metrics: dict[str, list[float]] = field(default_factory=dict)
    """Metrics of the scores, by name."""
    statuses: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    truncated: int = 0
    versions: set[int] = field(default_factory=set)
    staleness: int = 0
    continued: int = 0
    trained_tokens: int = 0
    computed_tokens: int = 0
    operations: float = 0.0
    """Floating-point operations of the micro-batches, forward and backward (engine.model.flops)."""
    micro_batches: int = 0
    scored_tokens: int = 0
    loss_tokens: int = 0
    groups: int = 0
    unequal: int = 0
    """Groups whose rewards differ."""
    losses: list[float] = field(default_factory=lambda: [0.0])
    """Sum of the responses' losses for each update."""
    kl: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    dropped: float = 0.0
    old_ratio_max: float = 0.0
    max_ratio_gap: float = 0.0
    mismatch_kl: float = 0.0
    train_s: float = 0.0
    score_s: float = 0.0
    wait_first_s: float = 0.0
    wait_s: float = 0.0
    expert_tokens: dict[int, list[int]] = field(default_factory=dict)
    """Tokens sent to each expert, by layer."""

    def add_group(self, group: Group, loss_tokens: int, unequal: bool) -> None:
        """Count a group's responses and scores.

        `loss_tokens`: number of its trained response tokens; `unequal`: whether its rewards differ.
        """
        self.groups += 1
        self.loss_tokens += loss_tokens
        self.unequal += unequal
        self.rewards += [score.value for score in group.scores if not score.excluded]
        self.excluded += sum(score.excluded for score in group.scores)
        for score in group.scores:
            for name, value in () if score.excluded else score.metrics.items():
                self.reward_metrics.setdefault(name, []).append(value)
        self.statuses += [score.status for score in group.scores]
        self.lengths += [len(response.token_ids) for response in group.responses]
        self.truncated += sum(response.truncated for response in group.responses)
        self.versions |= {version for response in group.responses for _, version in response.versions}
        self.staleness += sum(response_staleness(group.step, response) for response in group.responses)
        self.continued += sum(len(response.versions) > 1 for response in group.responses)
        self.trained_tokens += trained_tokens(group)

    def add_wait(self, seconds: float) -> None:
        """Count the seconds that the loop waited for groups."""
        if not self.lengths:
            self.wait_first_s += seconds
        self.wait_s += seconds

    def worst_gap(self, gap: float) -> None:
        """Keep the largest ratio gap. NaN replaces every number, so that it can't go unnoticed."""
        self.max_ratio_gap = _largest_or_nan((self.max_ratio_gap, gap))

    def worst_ratio(self, ratio: float) -> None:
        """Keep the largest ratio of the loss; NaN replaces every number."""
        self.old_ratio_max = _largest_or_nan((self.old_ratio_max, ratio))

    @staticmethod
    def merged(
        ranks: Sequence[RankMetrics],
        denominators: Sequence[float],
        by_response: bool = True,
        peak: float | None = None,
    ) -> TrainingFigures:
        """Return the figures of steps.jsonl that the trainer knows, from the metrics of all ranks.

        The loss of each update is divided by its own denominator; the step's loss is the mean over updates. KL,
        entropy, clip fraction and dropped share follow the loss's aggregation: means over responses of their means over
        tokens, or means over all tokens. Each token counts once, with the values from its update. Times are means over
        the replica groups (their leaders), in seconds. `peak`: highest operations per second of a rank's device;
        without it "mfu" is left out.
        """
        sums = [asdict(rank.metrics) for rank in ranks]
        leaders = [asdict(rank.metrics) for rank in ranks if rank.leader]
        whole = StepMetrics(
            **{name: merge([one[name] for one in sums]) for name, merge in MERGED.items()},
            **{name: sum(one[name] for one in leaders) / len(leaders) for name in TIMES},
        )
        memory = [round(rank.peak_bytes / 2**30, 3) for rank in ranks]
        figures = whole._figures(denominators, by_response, memory)
        if peak is not None and whole.train_s > 0:
            figures["mfu"] = whole.operations / (whole.train_s * len(ranks) * peak)
        return figures

    def _figures(self, denominators: Sequence[float], by_response: bool, memory: list[float]) -> TrainingFigures:
        count = max(1, len(self.lengths))
        weight = count if by_response else max(1, self.loss_tokens)
        mean, deviation = mean_and_deviation(self.rewards)
        return {
            "versions_seen": sorted(self.versions),
            "staleness_mean": self.staleness / count,
            "continued": self.continued,
            "reward_mean": mean,
            "reward_std": deviation,
            "response_length_mean": sum(self.lengths) / count,
            **_spread(self.lengths),
            "truncated": self.truncated,
            "reward_timeouts": self.statuses.count("timeout"),
            "reward_errors": self.statuses.count("error"),
            "reward_excluded": self.excluded,
            "trained_tokens": self.trained_tokens,
            "computed_tokens": self.computed_tokens,
            "equal_groups": self.groups - self.unequal,
            "loss": fmean(loss / divisor for loss, divisor in zip(self.losses, denominators, strict=True)),
            "kl": self.kl / weight,
            "entropy": self.entropy / weight,
            "clip_fraction": self.clipped / weight,
            "mismatch_dropped": self.dropped / weight,
            "old_ratio_max": self.old_ratio_max,
            "max_ratio_gap": self.max_ratio_gap,
            "mismatch_kl": self.mismatch_kl / max(1, self.scored_tokens),
            "train_s": self.train_s,
            "score_s": self.score_s,
            "wait_first_s": self.wait_first_s,
            "wait_s": self.wait_s,
            "memory_peak_gib": memory,
            **self._balance(),
            **self._reward_metrics(),
        }

    def _reward_metrics(self) -> OptionalFigures:
        """Return mean and standard deviation of each metric of the scores; {} if they have none."""
        found: dict[str, float] = {}
        for name, values in self.reward_metrics.items():
            found[f"reward/{name}"], found[f"reward/{name}_std"] = mean_and_deviation(values)
        return {"reward_metrics": found} if found else {}

    def _balance(self) -> OptionalFigures:
        """Return the highest load of an expert relative to the mean of its layer; {} if no expert got any tokens."""
        loads = [max(tokens) * len(tokens) / sum(tokens) for tokens in self.expert_tokens.values() if any(tokens)]
        return {"expert_load_max": max(loads)} if loads else {}


class LossCounts(msgspec.Struct):
    """One rank's counts for the denominator of an update."""

    tokens: int = 0
    """Trained response tokens."""
    groups: int = 0
    unequal: int = 0
    """Groups whose rewards differ."""
    unsound: list[str] = []
    """Ids of prompts whose micro-batches have a loss figure that is not finite."""

    def add_group(self, tokens: int, unequal: bool) -> None:
        """Count a group."""
        self.tokens += tokens
        self.groups += 1
        self.unequal += unequal


Advantages = dict[int, dict[int, float]]
"""The advantages of responses, by the index of their group and their number in it."""


class RankMetrics(msgspec.Struct):
    """One rank's message to the others at the end of the step."""

    metrics: StepMetrics
    leader: bool
    """Whether the rank leads its replica group."""
    peak_bytes: int
    """`Platform.peak_bytes` of the rank."""
    advantages: Advantages = {}
    """Of the responses in the rank's micro-batches; empty on ranks that compute no loss."""


def joined_advantages(ranks: Iterable[RankMetrics]) -> Advantages:
    """Return the advantages of the whole step."""
    whole: Advantages = {}
    for index, found in chain.from_iterable(rank.advantages.items() for rank in ranks):
        whole.setdefault(index, {}).update(found)
    return whole


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation (of the population); zeros without any value."""
    count = max(1, len(values))
    mean = sum(values) / count
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / count)


def _spread(lengths: Sequence[int]) -> LengthSpread:
    """Return the figures of the spread of responses' lengths, in tokens; zeros without a response."""
    ordered = sorted(lengths)
    longest = ordered[len(ordered) - math.ceil(len(ordered) / 10) :]
    return {
        "response_length_p90": ordered[math.ceil(0.9 * len(ordered)) - 1] if ordered else 0,
        "response_length_max": ordered[-1] if ordered else 0,
        "response_length_tail": sum(longest) / max(1, sum(ordered)),
    }


def _largest_or_nan(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if any value is NaN, so that a NaN can't go unnoticed."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def _concatenated(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def _lists_joined(found: Iterable[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    whole: dict[str, list[float]] = {}
    for one in found:
        for name, values in one.items():
            whole.setdefault(name, []).extend(values)
    return whole


def _added_by_layer(found: Iterable[dict[int, list[int]]]) -> dict[int, list[int]]:
    whole: dict[int, list[int]] = {}
    for layer, tokens in chain.from_iterable(one.items() for one in found):
        whole[layer] = [sum(pair) for pair in zip(whole.get(layer, [0] * len(tokens)), tokens, strict=True)]
    return whole


MERGED: dict[str, Callable[[list[Any]], Any]] = {
    **dict.fromkeys(("rewards", "statuses", "lengths"), _concatenated),
    "versions": lambda found: set(_concatenated(found)),
    **dict.fromkeys(("staleness", "continued", "truncated", "trained_tokens", "computed_tokens", "scored_tokens"), sum),
    **dict.fromkeys(("excluded", "loss_tokens", "groups", "unequal", "operations"), sum),
    "losses": lambda found: [sum(of_update) for of_update in zip(*found, strict=True)],
    **dict.fromkeys(("kl", "entropy", "clipped", "dropped", "mismatch_kl"), sum),
    **dict.fromkeys(("old_ratio_max", "max_ratio_gap"), _largest_or_nan),
    "expert_tokens": _added_by_layer,
    "reward_metrics": _lists_joined,
}
"""How to merge the ranks' values of each figure into the step's."""
