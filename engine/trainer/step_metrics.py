"""What ranks add up during a step, the counts for the denominators of its updates, and the report built from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from engine.algorithm.kl import mismatch_figures
from engine.algorithm.losses import Loss
from engine.errors import MetronomeError
from engine.schedule import response_staleness
from engine.trainer.group_advantages import GroupAdvantages
from engine.trainer.micro_batches import MicroBatch, trained_tokens
from engine.trainer.ranks.rank_group import RankGroup
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
    trained: list[int] = field(default_factory=list)
    """Trained tokens of each response."""
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

    def add_group(self, group: Group, trained: Sequence[int], unequal: bool) -> None:
        """Count a group's responses and scores.

        `trained`: [G] trained tokens of its responses; `unequal`: whether its rewards differ.
        """
        self.groups += 1
        self.trained += trained
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
        tokens, or means over all tokens, of what is trained. Each token counts once, with the values from its update.
        Times are means over the replica groups (their leaders), in seconds. `peak`: highest operations per second of a
        rank's device; without it "mfu" is left out.
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
        weight = max(1, sum(map(bool, self.trained)) if by_response else sum(self.trained))
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
    **dict.fromkeys(("rewards", "statuses", "lengths", "trained"), _concatenated),
    "versions": lambda found: set(_concatenated(found)),
    **dict.fromkeys(("staleness", "continued", "truncated", "trained_tokens", "computed_tokens", "scored_tokens"), sum),
    **dict.fromkeys(("excluded", "groups", "unequal", "operations"), sum),
    "losses": lambda found: [sum(of_update) for of_update in zip(*found, strict=True)],
    **dict.fromkeys(("kl", "entropy", "clipped", "dropped", "mismatch_kl"), sum),
    **dict.fromkeys(("old_ratio_max", "max_ratio_gap"), _largest_or_nan),
    "expert_tokens": _added_by_layer,
    "reward_metrics": _lists_joined,
}
"""How to merge the ranks' values of each figure into the step's."""


class StepSums:
    """One rank's sums over a step."""

    def __init__(self, ranks: RankGroup, group_advantages: GroupAdvantages, updates: int) -> None:
        """`updates`: number of updates in a step."""
        self.metrics = StepMetrics(losses=[0.0] * updates)
        self.advantages: Advantages = {}
        self.denominators: list[float] = []
        """Denominators of the updates already reduced."""
        self._ranks = ranks
        self._group_advantages = group_advantages
        self._counts = [LossCounts() for _ in range(updates)]
        self._unsound: set[str] = set()
        """Ids of prompts whose micro-batches have a figure that is not finite."""
        self._on_device: list[Tensor] = []
        """Flat tensors of the current window, which `end_window` copies to the host."""
        self._when_copied: list[Callable[[Tensor], None]] = []
        """For each of these tensors, the function that receives its host copy."""

    @property
    def update(self) -> int:
        """Number of the current update."""
        return len(self.denominators)

    def add_window(self, window: Sequence[Group]) -> None:
        """Count the groups of a window. Does nothing on ranks that do not lead their replica group."""
        if not self._ranks.leader:
            return
        for group in window:
            trained = self._group_advantages.count_tokens(group)
            unequal = self._group_advantages.unequal(group)
            self.metrics.add_group(group, trained, unequal)
            self._counts[group.mini_batch].add_group(sum(trained), unequal)

    def compare_logprobs(self, batch: MicroBatch, logprobs: Tensor) -> None:
        """Schedule the comparison of the trainer's [T] log-probabilities with the instances' for the end of the
        window. Tokens that were not sampled are left out."""
        self._on_device.append(torch.cat([logprobs, batch.rollout, batch.sampled.to(logprobs.dtype)]))
        self._when_copied.append(partial(self._add_comparison, batch))

    def add_loss(self, batch: MicroBatch, loss: Loss) -> None:
        """Schedule a micro-batch's loss to be added to the current update at the end of the window."""
        if not self._ranks.judges:
            return
        figures = (loss.total.detach(), loss.kl, loss.entropy, loss.ratio_max, loss.clipped, loss.dropped)
        self._on_device.append(torch.stack(figures))
        self._when_copied.append(partial(self._add_figures, batch, self.update))

    def end_window(self) -> None:
        """Add the figures that the window's micro-batches left on the device to the metrics. All are copied to the host
        at once, because each copy waits for all earlier work on the device."""
        if not self._on_device:
            return
        sizes = [piece.numel() for piece in self._on_device]
        pieces = torch.cat(self._on_device).cpu().split(sizes)
        for add, piece in zip(self._when_copied, pieces, strict=True):
            add(piece)
        self._on_device.clear()
        self._when_copied.clear()

    def _add_comparison(self, batch: MicroBatch, compared: Tensor) -> None:
        """`compared`: [3·T] log-probabilities, first the trainer's, then the instances', and whether the token was
        sampled."""
        ours, theirs, sampled = compared.chunk(3)
        kept = sampled > 0
        gap, divergence = mismatch_figures(ours[kept], theirs[kept])
        self.metrics.worst_gap(gap)
        if not self._ranks.judges:
            return
        self._note_unsound(batch, (gap, divergence))
        self.metrics.mismatch_kl += divergence
        self.metrics.scored_tokens += int(kept.sum())

    def _add_figures(self, batch: MicroBatch, update: int, figures: Tensor) -> None:
        total, kl, entropy, ratio_max, clipped, dropped = map(float, figures.tolist())
        metrics = self.metrics
        metrics.losses[update] += total
        metrics.kl += kl
        metrics.entropy += entropy
        metrics.clipped += clipped
        metrics.dropped += dropped
        metrics.worst_ratio(ratio_max)
        for (group, number), advantage in zip(batch.members, batch.of_members, strict=True):
            self.advantages.setdefault(group.index, {})[number] = advantage
        self._note_unsound(batch, (total, kl, entropy, ratio_max))

    def _note_unsound(self, batch: MicroBatch, figures: Sequence[float]) -> None:
        if not all(map(math.isfinite, figures)):
            self._unsound |= {group.prompt.id for group, _ in batch.members}

    def counts(self) -> LossCounts:
        """Return the counts of the current update over all ranks. Collective over all ranks.

        Raises MetronomeError, which names the prompts, if a figure was not finite on any rank.
        """
        mine = self._counts[self.update]
        mine.unsound = sorted(self._unsound)
        found = self._ranks.gather(mine)
        if unsound := sorted({prompt for counts in found for prompt in counts.unsound}):
            raise MetronomeError(
                f"loss, KL, entropy or a ratio is not finite in the micro-batches of prompts {unsound}; the update was "
                "not made (weights are unchanged)"
            )
        return LossCounts(
            tokens=sum(counts.tokens for counts in found),
            groups=sum(counts.groups for counts in found),
            unequal=sum(counts.unequal for counts in found),
        )


def sum_over_context(sums: Tensor) -> Tensor:
    """Turn sums over this context rank's tokens into sums over the tokens of the whole row."""
    if sums.numel() and parallel_state.get_context_parallel_world_size() > 1:  # these ranks hold equally many sums
        dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
    return sums
