"""The sample queue of one step: groups come in as they finish, are leased to replicas, and count once trained.

Pure bookkeeping without threads or sockets; `engine.queue.server` serves it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.types import Group


class SampleQueue:
    """B groups of one step. Every group is acknowledged exactly once; a lease that ends without that returns it."""

    def __init__(self, step: int, expected: int, order: str = "arrival", hold: bool = False) -> None:
        """`order`: "arrival" or "prompt_order"; `hold`: lease nothing before all `expected` groups are in (sync)."""
        self.step = step
        self.expected = expected
        self._in_order = order == "prompt_order"
        self._hold = hold
        self._arrived: list[int] = []
        self._groups: dict[int, Group] = {}
        self._leases: dict[int, str] = {}
        self._trained: set[int] = set()

    def put(self, group: Group) -> None:
        """Add a finished group; a second one with the same index, or one of another step, is an error of ours."""
        if group.step != self.step or group.index in self._groups or not 0 <= group.index < self.expected:
            raise ValueError(f"group {group.index} of step {group.step} does not belong into the queue of step {self.step}")
        self._groups[group.index] = group
        self._arrived.append(group.index)

    def lease(self, replica: str, budget: int) -> list[Group]:
        """The next window for a replica: groups of at most `budget` tokens together, at least one; [] when none is due.

        In arrival order a window is whatever is there. In prompt order it is a function of the ordered groups alone: it is
        due once it can't grow any more.
        """
        if self._hold and len(self._arrived) < self.expected:
            return []
        window = self._arrived_window(budget) if not self._in_order else self._ordered_window(budget)
        self._leases.update(dict.fromkeys(window, replica))
        return [self._groups[index] for index in window]

    def _arrived_window(self, budget: int) -> list[int]:
        free = [index for index in self._arrived if index not in self._leases and index not in self._trained]
        return free[: self._fitting(free, budget)]

    def _ordered_window(self, budget: int) -> list[int]:
        taken = self._trained | self._leases.keys()
        first = next((index for index in range(self.expected) if index not in taken), self.expected)
        last = first
        while last in self._groups:
            last += 1
        ready = list(range(first, last))
        count = self._fitting(ready, budget)
        return ready[:count] if count < len(ready) or last == self.expected else []

    def _fitting(self, indices: Sequence[int], budget: int) -> int:
        """How many groups from the first on fit into the budget; one always does."""
        used = 0
        for count, index in enumerate(indices):
            used += size(self._groups[index])
            if used > budget and count:
                return count
        return len(indices)

    def acknowledge(self, indices: Sequence[int], replica: str) -> None:
        """The groups' gradients are in. Only the replica that holds the leases may say so."""
        for index in indices:
            if self._leases.get(index) != replica:
                raise ValueError(f"{replica} holds no lease on group {index} of step {self.step}")
            del self._leases[index]
            self._trained.add(index)

    def give_back(self, replica: str) -> list[int]:
        """End all leases of a replica that is gone; its groups can be leased again. Returns their indices."""
        returned = sorted(index for index, holder in self._leases.items() if holder == replica)
        for index in returned:
            del self._leases[index]
        return returned

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
