"""The sample queue of one step: groups come in as they finish, are leased to replicas, and count once trained.

Pure bookkeeping without threads or sockets; `engine.queue.server` serves it.
"""

from __future__ import annotations

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

    def lease(self, replica: str) -> Group | None:
        """The next group for a replica, or None when there is none now."""
        if self._hold and len(self._arrived) < self.expected:
            return None
        for index in self._candidates():
            if index not in self._leases and index not in self._trained:
                self._leases[index] = replica
                return self._groups[index]
        return None

    def _candidates(self) -> list[int]:
        if not self._in_order:
            return self._arrived
        taken = self._trained | self._leases.keys()
        first = next((index for index in range(self.expected) if index not in taken), self.expected)
        return [first] if first in self._groups else []

    def acknowledge(self, index: int, replica: str) -> None:
        """The group's gradient is in. Only the replica that holds the lease may say so."""
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
