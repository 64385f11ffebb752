"""The sample queue of one step: groups come in as they finish, are leased to replicas, and count once trained.

Pure bookkeeping without threads or sockets; `engine.wire.control_server` serves it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.types import Group, Landed


class SampleQueue:
    """B groups of one step for the trainer's units. Every group is leased once and acknowledged once.

    A unit that dies takes its gradient with it, so its leases are not handed on: the run stops and redoes the step.
    """

    def __init__(self, step: int, expected: int, order: str = "arrival", hold: bool = False, units: int = 1) -> None:
        """`order`: "arrival" or "prompt_order"; `hold`: lease nothing before all `expected` groups are in (sync)."""
        self.step = step
        self.expected = expected
        self._in_order = order == "prompt_order"
        self._hold = hold
        self._units = units
        self._arrived: list[int] = []
        self._groups: dict[int, Group] = {}
        self._leases: dict[int, int] = {}
        self._trained: set[int] = set()
        self._landed: dict[tuple[int, int], Landed] = {}  # not yet scored, of groups that are not complete
        self._scorer: dict[int, int] = {}  # which unit holds early scores of a group
        self._ordered: list[list[int]] = []  # windows in prompt order, as far as they are known
        self._taken = [0] * units  # how many of them each unit has had

    def put(self, group: Group) -> None:
        """Add a finished group; a second one with the same index, or one of another step, is an error of ours."""
        if group.step != self.step or group.index in self._groups or not 0 <= group.index < self.expected:
            raise ValueError(
                f"group {group.index} of step {group.step} does not belong into the queue of step {self.step}"
            )
        self._groups[group.index] = group
        self._arrived.append(group.index)
        self._landed = {key: landed for key, landed in self._landed.items() if landed.group != group.index}

    def land(self, landed: Landed) -> None:
        """Add a response of a group that is not complete yet."""
        self._landed[landed.group, landed.number] = landed

    def early(self, unit: int, budget: int) -> list[Landed]:
        """Landed responses of at most `budget` tokens for a unit to score while it has nothing to train."""
        taken: list[Landed] = []
        for landed in list(self._landed.values()):
            if self._scorer.get(landed.group, unit) == unit:
                budget -= len(landed.prompt) + len(landed.token_ids)
                if budget < 0 and taken:
                    break
                taken.append(self._landed.pop((landed.group, landed.number)))
                self._scorer[landed.group] = unit
        return taken

    def lease(self, unit: int, budget: int) -> list[Group]:
        """The next window for a unit: groups of at most `budget` tokens together, at least one; [] when none is due.

        In arrival order a window is whatever is there, for whoever asks. In prompt order windows are a function of the
        ordered groups alone, each due once it can't grow any more, and go to the units in turn.
        """
        if self._hold and len(self._arrived) < self.expected:
            return []
        window = self._ordered_window(unit, budget) if self._in_order else self._arrived_window(unit, budget)
        self._leases.update(dict.fromkeys(window, unit))
        return [self._groups[index] for index in window]

    def _arrived_window(self, unit: int, budget: int) -> list[int]:
        """First the groups that the unit has scored early, last those that another one has."""
        free = [index for index in self._arrived if index not in self._leases and index not in self._trained]
        if self._scorer:
            free.sort(key=lambda index: (self._scorer.get(index) != unit, index in self._scorer))
        return free[: self._fitting(free, budget)]

    def _ordered_window(self, unit: int, budget: int) -> list[int]:
        self._cut_windows(budget)
        number = unit + self._taken[unit] * self._units
        if number >= len(self._ordered):
            return []
        self._taken[unit] += 1
        return self._ordered[number]

    def _cut_windows(self, budget: int) -> None:
        """Cut windows from the groups that stand next in prompt order, as long as the next one's end is known."""
        while True:
            first = self._ordered[-1][-1] + 1 if self._ordered else 0
            last = first
            while last in self._groups:
                last += 1
            ready = list(range(first, last))
            count = self._fitting(ready, budget)
            if not ready or (count == len(ready) and last < self.expected):
                return
            self._ordered.append(ready[:count])

    def _fitting(self, indices: Sequence[int], budget: int) -> int:
        """How many groups from the first on fit into the budget; one always does."""
        used = 0
        for count, index in enumerate(indices):
            used += size(self._groups[index])
            if used > budget and count:
                return count
        return len(indices)

    def acknowledge(self, indices: Sequence[int], unit: int) -> None:
        """The groups' gradients are in. Only the unit that holds the leases may say so."""
        for index in indices:
            if self._leases.get(index) != unit:
                raise ValueError(f"unit {unit} of the trainer holds no lease on group {index} of step {self.step}")
            del self._leases[index]
            self._trained.add(index)

    @property
    def arrived(self) -> int:
        """Groups that have come in."""
        return len(self._arrived)

    @property
    def done(self) -> bool:
        """Whether all expected groups are trained."""
        return len(self._trained) == self.expected


def size(group: Group) -> int:
    """Tokens of a group with its prompt once."""
    return len(group.prompt.token_ids) + sum(len(response.token_ids) for response in group.responses)
