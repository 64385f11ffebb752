"""The sample queue of one step: groups come in as they finish, are leased to units, and count once they are trained.

Pure bookkeeping without threads or sockets; `engine.launcher.coordinator` leases from it for the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from engine.types import BatchScores
from engine.wire.codec import PackedLanded
from engine.wire.sealed import SealedGroup


class SampleQueue:
    """The sealed groups of one step, for the trainer's units. Every group is leased once and acknowledged once.

    The leases of a unit that dies are not given to another unit, because its gradient is lost: the run stops, and the
    step is redone.
    """

    def __init__(
        self,
        step: int,
        expected: int,
        order: str = "arrival",
        hold: bool = False,
        units: int = 1,
        updates: int = 1,
        least: int = 0,
        bubble: int = 0,
    ) -> None:
        """`expected`: number of groups; `order`: "arrival" or "prompt_order"; `hold` (mode "sync"): lease nothing
        before all groups have come in; `updates`: number of mini-batches, into which the groups go in that order;
        `least`: tokens of a window below which it is not made smaller for the balance of the units; `bubble`: tokens
        that a unit could train in the time that its pipeline fills and drains, once in each window."""
        self.step = step
        self.expected = expected
        self.batch: BatchScores | None = None
        """The scores of the whole batch, which each window brings along; None if no advantage depends on them."""
        self._mini_batch = expected // updates
        # so that every unit has a part of each mini-batch
        self._most = expected if updates == 1 else -(-self._mini_batch // units)
        self._in_order = order == "prompt_order"
        self._hold = hold
        self._units = units
        self._least = least
        self._bubble = bubble
        self._arrived: list[int] = []
        self._tokens = 0
        """Tokens of the groups that have come in."""
        self._groups: dict[int, SealedGroup] = {}
        self._leases: dict[int, int] = {}
        self._trained: set[int] = set()
        self._landed: dict[tuple[int, int], PackedLanded] = {}
        """Responses that no unit scores yet, of groups that are not complete, by (group, number)."""
        self._scorer: dict[int, int] = {}
        """By group: the unit that holds its early scores."""
        self._ordered: list[list[int]] = []
        """Windows in prompt order, as far as they are known."""
        self._taken = [0] * units
        """By unit: the number of windows of `_ordered` that it has leased."""
        self._given = [[0] * units for _ in range(updates)]
        """By mini-batch and unit: the tokens of the windows that it has leased in arrival order."""

    def put(self, group: SealedGroup) -> None:
        """Add a finished group. Raises ValueError for another step's group, and for a wrong or repeated index."""
        if group.step != self.step or group.index in self._groups or not 0 <= group.index < self.expected:
            raise ValueError(
                f"group {group.index} of step {group.step} does not belong into the queue of step {self.step}"
            )
        place = group.index if self._in_order else len(self._arrived)
        self._groups[group.index] = replace(group, mini_batch=place // self._mini_batch)
        self._arrived.append(group.index)
        self._tokens += group.tokens
        self._landed = {key: landed for key, landed in self._landed.items() if landed.group != group.index}

    def land(self, landed: PackedLanded) -> None:
        """Add a response of a group that is not complete yet."""
        self._landed[landed.group, landed.number] = landed

    def early(self, unit: int, budget: int) -> list[PackedLanded]:
        """Return responses for a unit to score early while it has nothing to train.

        They have at most `budget` tokens with their prompts, but one is always returned if there is any. All responses
        of a group go to the same unit.
        """
        taken: list[PackedLanded] = []
        for landed in list(self._landed.values()):
            if self._scorer.get(landed.group, unit) == unit:
                budget -= landed.tokens
                if budget < 0 and taken:
                    break
                taken.append(self._landed.pop((landed.group, landed.number)))
                self._scorer[landed.group] = unit
        return taken

    def lease(self, unit: int, budget: int) -> list[SealedGroup]:
        """Lease the next window to a unit: groups of at most `budget` tokens together, but at least one group. Returns
        [] if there is no window yet.

        In arrival order a window is made of the groups that are there, for the unit that asks, and not so large that
        the others would have to wait for it (`_largest`). In prompt order the windows are a function of the ordered
        groups alone: a window is leased once it can't grow any more, and the units get the windows in turn. A window
        has groups of one mini-batch.
        """
        if self._hold and len(self._arrived) < self.expected:
            return []
        window = self._ordered_window(unit, budget) if self._in_order else self._arrived_window(unit, budget)
        self._leases.update(dict.fromkeys(window, unit))
        return [self._groups[index] for index in window]

    def _arrived_window(self, unit: int, budget: int) -> list[int]:
        """Choose first the groups that this unit has scored early, last those that another unit has scored early."""
        free = [index for index in self._arrived if index not in self._leases and index not in self._trained]
        mini_batch = min((self._groups[index].mini_batch for index in free), default=0)
        free = [index for index in free if self._groups[index].mini_batch == mini_batch]
        if self._scorer:
            free.sort(key=lambda index: (self._scorer.get(index) != unit, index in self._scorer))
        window = free[: self._count_fitting(free, self._largest(unit, budget, free, mini_batch))]
        self._given[mini_batch][unit] += sum(self._groups[index].tokens for index in window)
        return window

    def _largest(self, unit: int, budget: int, free: Sequence[int], mini_batch: int) -> int:
        """Return the largest number of tokens of the next window: `budget`, or less, so that the units end the
        mini-batch together.

        A window has at most 1 / (2 · units) of what no unit has of the mini-batch yet. This is guided self-scheduling
        (Polychronopoulos and Kuck 1987) with factoring's half (Hummel, Schonberg and Flynn 1992); it is how AsyncFlow's
        balance of tokens (§3.3) is kept here. A group that has not come in counts with the mean of those that have. One
        unit has nobody to wait for.
        """
        if self._units == 1 or not free:
            return budget
        coming = max(0, (mini_batch + 1) * self._mini_batch - len(self._arrived))
        mean = self._tokens / len(self._arrived)
        remaining = sum(self._groups[index].tokens for index in free) + coming * mean
        guided = remaining / (2 * self._units)
        if not self._bubble:
            return min(budget, max(self._least, int(guided)))
        size = max(guided, self._even(unit, budget, remaining, mini_batch))
        return budget if size + mean > budget else int(size + mean / 2)

    def _even(self, unit: int, budget: int, remaining: float, mini_batch: int) -> float:
        """Return the tokens of each window of a unit under a pipeline: its part of an equal share, in as few windows as
        the budget allows.

        Each window costs the bubble once more, so the fewest windows, equally large, end first (chunks of equal size,
        where a chunk costs a fixed time: Kruskal and Weiss 1985). All units then end after share + windows · bubble;
        if full windows are given as long as there are groups, one unit ends no sooner than that. A unit that lacks
        less than the bubble of its share has it.
        """
        given = self._given[mini_batch]
        share = (remaining + sum(given)) / self._units
        lacking = [share - one if not one or share - one > self._bubble else 0.0 for one in given]
        if not lacking[unit]:
            return self._bubble
        part = remaining * lacking[unit] / sum(lacking)
        return part / math.ceil(part / budget)

    def _ordered_window(self, unit: int, budget: int) -> list[int]:
        self._cut_windows(budget)
        number = unit + self._taken[unit] * self._units
        if number >= len(self._ordered):
            return []
        self._taken[unit] += 1
        return self._ordered[number]

    def _cut_windows(self, budget: int) -> None:
        """Cut the next groups in prompt order into windows, as long as the end of the next window is known."""
        while True:
            first = self._ordered[-1][-1] + 1 if self._ordered else 0
            border = (first // self._mini_batch + 1) * self._mini_batch
            last = first
            while last < border and last in self._groups:
                last += 1
            ready = list(range(first, last))
            count = self._count_fitting(ready, budget)
            if not ready or (count == len(ready) and count < self._most and last < border):
                return
            self._ordered.append(ready[:count])

    def _count_fitting(self, indices: Sequence[int], budget: int) -> int:
        """Return how many groups, from the first on, fit into a window; the first always counts as fitting."""
        used = 0
        for count, index in enumerate(indices):
            used += self._groups[index].tokens
            if count and (used > budget or count == self._most):
                return count
        return len(indices)

    def acknowledge(self, indices: Sequence[int], unit: int) -> None:
        """Mark groups as trained: `unit` has their gradients. Raises ValueError if it holds no lease on one of them."""
        for index in indices:
            if self._leases.get(index) != unit:
                raise ValueError(f"unit {unit} of the trainer holds no lease on group {index} of step {self.step}")
            del self._leases[index]
            self._trained.add(index)

    def begin_again(self) -> None:
        """Forget what was leased and trained: a new attempt trains the step from its first group on."""
        self._leases.clear()
        self._trained.clear()
        self._scorer.clear()
        self._ordered.clear()
        self._taken = [0] * self._units
        self._given = [[0] * self._units for _ in self._given]

    @property
    def arrived(self) -> int:
        """Number of groups that have come in."""
        return len(self._arrived)

    @property
    def trained(self) -> int:
        """Number of groups that are trained."""
        return len(self._trained)

    @property
    def done(self) -> bool:
        """Whether all expected groups are trained."""
        return len(self._trained) == self.expected
