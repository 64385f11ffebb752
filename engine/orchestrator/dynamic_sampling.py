"""DAPO's dynamic sampling (arXiv:2503.14476, §3.2, eq. 11): selects which of the generated groups a step trains.

It keeps the first B groups *in prompt order* whose rewards are not all equal. Order of arrival would favour short
responses. The kept set depends only on prompt order and rewards: how many more prompts are tried, and when their groups
arrive, does not change it. Pure bookkeeping; `engine.orchestrator.producer` generates the groups.
"""

from __future__ import annotations

from msgspec.structs import replace

from engine.algorithm.shaping import are_equal
from engine.errors import MetronomeError
from engine.wire.columns import Row, open_scores

MOST_BATCHES = 10
"""Largest number of prompts that a step may use, as a multiple of train.prompts_per_step; verl's value."""


class DynamicSampling:
    """Selects the first `wanted` groups with unequal rewards, from at most `limit` prompts numbered from 0."""

    def __init__(self, wanted: int, limit: int, step: int = 0) -> None:
        """`limit`: the largest number of prompts that the step may use. `step`: for messages."""
        self.wanted = wanted
        self.limit = limit
        self.found = 0
        """Number of groups with unequal rewards so far; groups of earlier prompts may still be missing."""
        self.used: int | None = None
        """Number of prompts up to and including the last one that was kept; None until this is known."""
        self._step = step
        self._verdicts: dict[int, Row | None] = {}
        self._decided = 0
        """Number of leading prompts whose groups are all known."""
        self._kept = 0
        """Number of these prompts whose groups were kept."""

    @property
    def complete(self) -> bool:
        """Whether all wanted groups are known."""
        return self.used is not None

    def wants(self, tried: int, in_flight: int, room: bool) -> bool:
        """Return whether to try another prompt, after `tried` prompts of which `in_flight` are still being generated.

        As many prompts are in flight as groups are still wanted, and more while the instances have `room` for another
        group. Once enough groups are found, a prompt that starts later can't be among the first.
        """
        return self.found < self.wanted and tried < self.limit and (room or in_flight < self.wanted - self.found)

    def add_group(self, row: Row) -> list[Row]:
        """Add a finished group, whose `index` is the prompt's number. Return the groups that are now selected.

        Their `index` is their place among the selected groups, 0 … B−1, in prompt order. A group is selected once the
        groups of all earlier prompts are known. Raises MetronomeError if too few of the first `limit` prompts were
        kept.
        """
        unequal = is_unequal(row)
        self._verdicts[row.index] = row if unequal else None
        self.found += unequal
        due = []
        while not self.complete and self._decided in self._verdicts:
            kept = self._verdicts.pop(self._decided)
            self._decided += 1
            if kept is not None:
                due.append(replace(kept, index=self._kept))
                self._kept += 1
            if self._kept == self.wanted:
                self.used = self._decided
            elif self._decided == self.limit:
                raise self._too_few()
        return due

    def _too_few(self) -> MetronomeError:
        return MetronomeError(
            f"step {self._step}: only {self._kept} of {self.limit} prompts have responses with different rewards, but "
            f"train.prompts_per_step = {self.wanted} are needed. Too few problems are solved only sometimes: use "
            "problems of a suitable difficulty, or a larger rollout.group_size"
        )


def is_unequal(row: Row) -> bool:
    """Return whether some responses of the group are right, but not all (DAPO eq. 11): by `Score.correct` if every
    response has it, else by the verifier's scores, which must differ by more than rounding. Excluded responses don't
    count. Reward shaping, such as the penalty on long responses, is not part of these scores."""
    scores = [score for score in open_scores(row) if not score.excluded]
    judged = [float(score.correct) for score in scores if score.correct is not None]
    return not are_equal(judged if len(judged) == len(scores) else [score.value for score in scores])
