"""What a step adds up while it runs, and the report it becomes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from engine.trainer.batch import trained_tokens
from engine.types import Group


@dataclass
class Tally:
    """Sums over the groups and micro-batches of one step on one replica."""

    rewards: list[float] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    truncated: int = 0
    versions: set[int] = field(default_factory=set)
    trained_tokens: int = 0
    computed_tokens: int = 0
    scored_tokens: int = 0
    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    old_ratio_max: float = 0.0
    max_ratio_gap: float = 0.0
    mismatch_kl: float = 0.0
    train_s: float = 0.0
    score_s: float = 0.0
    wait_first_s: float = 0.0
    wait_s: float = 0.0

    def add_group(self, group: Group) -> None:
        """Count a group's responses and scores."""
        self.rewards += [score.value for score in group.scores]
        self.statuses += [score.status for score in group.scores]
        self.lengths += [len(response.token_ids) for response in group.responses]
        self.truncated += sum(response.truncated for response in group.responses)
        self.versions |= {version for response in group.responses for _, version in response.versions}
        self.trained_tokens += trained_tokens(group)

    def add_wait(self, seconds: float) -> None:
        """Count time blocked on the queue."""
        if not self.lengths:
            self.wait_first_s += seconds
        self.wait_s += seconds

    def worst_gap(self, gap: float) -> None:
        """Keep the largest ratio gap; NaN wins over everything, so that it can't hide."""
        self.max_ratio_gap = gap if math.isnan(gap) else max(self.max_ratio_gap, gap)

    def figures(self) -> dict[str, Any]:
        """The keys of steps.jsonl that a replica knows: means over responses, times in seconds."""
        count = max(1, len(self.rewards))
        mean = sum(self.rewards) / count
        return {
            "versions_seen": sorted(self.versions),
            "reward_mean": mean,
            "reward_std": math.sqrt(sum((reward - mean) ** 2 for reward in self.rewards) / count),
            "response_length_mean": sum(self.lengths) / count,
            "truncated": self.truncated,
            "reward_timeouts": self.statuses.count("timeout"),
            "reward_errors": self.statuses.count("error"),
            "trained_tokens": self.trained_tokens,
            "computed_tokens": self.computed_tokens,
            "loss": self.loss / count,
            "kl": self.kl / count,
            "entropy": self.entropy / count,
            "clip_fraction": self.clipped / count,
            "old_ratio_max": self.old_ratio_max,
            "max_ratio_gap": self.max_ratio_gap,
            "mismatch_kl": self.mismatch_kl / max(1, self.scored_tokens),
            "train_s": self.train_s,
            "score_s": self.score_s,
            "wait_first_s": self.wait_first_s,
            "wait_s": self.wait_s,
        }
