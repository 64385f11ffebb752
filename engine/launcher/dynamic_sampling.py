"""DAPO's dynamic sampling (arXiv:2503.14476, §3.2, eq. 11): which of the groups that a step has tried it trains.

Kept are the first B groups *in prompt order* whose rewards are not all equal. In order of arrival short responses would
be favoured. Which prompts are tried, and when their groups arrive, changes nothing: the kept set is a function of
prompt order and rewards. Pure bookkeeping; `engine.launcher.producer` generates the groups.
"""

from __future__ import annotations

from dataclasses import replace

from engine.errors import MetronomeError
from engine.types import Group


class DynamicSampling:
    """The first `wanted` groups with unequal rewards among the prompts numbered from 0, at most `limit` of them."""

    def __init__(self, wanted: int, limit: int, step: int = 0) -> None:
        """`limit`: prompts that the step may use; `step` is for messages."""
        self.wanted = wanted
        self.limit = limit
        self.found = 0
        """Groups with unequal rewards so far, in any order; prompts before them may still be undecided."""
        self.used: int | None = None
        """Prompts up to and with the last one that was kept; None until that is known."""
        self._step = step
        self._verdicts: dict[int, Group | None] = {}
        self._decided = self._kept = 0  # prompts from the first on that are decided; those of them that were kept

    @property
    def complete(self) -> bool:
        """Whether all wanted groups are known."""
        return self.used is not None

    def wants(self, tried: int, in_flight: int, room: int) -> bool:
        """Whether to try another prompt: as long as groups may lack, and beyond that to keep `room` for groups busy.

        Once enough are found none that is begun later can be among the first.
        """
        return self.found < self.wanted and tried < self.limit and in_flight < max(self.wanted - self.found, room)

    def decide(self, group: Group) -> list[Group]:
        """Take in a finished group, its `index` the prompt's number; returns the groups whose place is known by it.

        They are numbered 0 … B−1 in prompt order. One is due as soon as all prompts before it are decided. Raises
        MetronomeError when the first `limit` prompts are decided and too few were kept.
        """
        unequal = is_unequal(group)
        self._verdicts[group.index] = group if unequal else None
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
            f"step {self._step}: of {self.limit} prompts only {self._kept} have responses with different rewards, but "
            f"train.prompts_per_step = {self.wanted} are needed. algorithm.dynamic_sampling finds too few problems "
            "that the policy solves sometimes: use problems of a fitting difficulty, a larger rollout.group_size, or "
            "raise algorithm.dynamic_sampling_batches"
        )


def is_unequal(group: Group) -> bool:
    """Whether the verifier's scores differ (DAPO eq. 11: some responses are right, not all); shaping does not count."""
    return any(score.value != group.scores[0].value for score in group.scores)
