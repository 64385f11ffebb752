"""The ledger of one stage in one step: which rows are ready, how they are cut into windows, and which are done.

Pure bookkeeping without rows, clocks or sockets. `engine.orchestrator.steps` keeps a ledger for each stage and step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Windows:
    """How the rows of a stage are given out."""

    order: str = "arrival"
    """"arrival" or "prompt_order"."""
    hold: bool = False
    """Whether nothing is given out before all rows are ready (mode "sync")."""
    replica_groups: int = 1
    """Number of replica groups that take windows independently."""
    updates: int = 1
    """Number of mini-batches into which the rows are split, in their order."""
    least: int = 0
    """Tokens of a window below which it is not made smaller to balance the replica groups."""
    bubble: int = 0
    """Tokens that a replica group could train while its pipeline fills and drains, which happens once per window."""
    together: int = 1
    """Number of windows that a replica group gets as one if their rows are already waiting. In prompt order only with
    `bubble`."""


class Ledger:
    """The rows of one step, by index, for one stage. Every row is given to one replica group, and finished once.

    Only `begin_again` gives rows out a second time. `Steps` handles leases that expire.
    """

    def __init__(self, expected: int, windows: Windows) -> None:
        """`expected`: number of rows of the step."""
        self.expected = expected
        self._mini_batch = expected // windows.updates
        self._windows = windows
        self._in_order = windows.order == "prompt_order"
        self._ready: list[int] = []
        """Indices, in the order in which they became ready."""
        self._tokens: dict[int, int] = {}
        """By index: number of tokens of each row that is ready."""
        self._mini_batches: dict[int, int] = {}
        """By index: number of the mini-batch (update) in which the row is trained."""
        self._given: set[int] = set()
        self._done: set[int] = set()
        self._ordered: list[list[int]] = []
        """Windows in prompt order, as far as they are known."""
        self._window_of: dict[int, int] = {}
        """By index: the number of its window in `_ordered`."""
        self._taken = [0] * windows.replica_groups
        """By replica group: how many windows of `_ordered` it has taken."""
        self._tokens_given = [[0] * windows.replica_groups for _ in range(windows.updates)]
        """By mini-batch and replica group: the tokens of the windows taken in arrival order."""

    def add_ready(self, index: int, tokens: int) -> None:
        """Mark a row as ready. Raises ValueError for an index that is out of range or already ready."""
        if index in self._tokens or not 0 <= index < self.expected:
            raise ValueError(f"row {index} of {self.expected} is already ready, or does not exist")
        place = index if self._in_order else len(self._ready)
        self._mini_batches[index] = place // self._mini_batch
        self._ready.append(index)
        self._tokens[index] = tokens

    def mini_batch(self, index: int) -> int:
        """Return the number of the mini-batch (update) in which a ready row is trained."""
        return self._mini_batches[index]

    def take_window(self, replica_group: int, budget: int, ahead: bool = False) -> list[int]:
        """Give the next window to a replica group: rows of at most `budget` tokens in total, but at least one row.
        Return [] if there is no window yet.

        A window has rows of one mini-batch. In arrival order, it is made from the rows that are ready, for the replica
        group that asks, and small enough that the other replica groups need not wait for it (`_largest`). Several
        waiting windows are given as one (`_joined`). In prompt order, the windows depend only on the ordered rows: a
        window is given once it can't grow any more, and the replica groups take the windows in turn. `ahead`: the
        replica group is still training another window. In arrival order the reply is then [] once so little is left
        that windows must shrink to balance the groups.
        """
        if self._windows.hold and len(self._ready) < self.expected:
            return []
        window = (
            self._ordered_window(replica_group, budget)
            if self._in_order
            else self._arrived_window(replica_group, budget, ahead)
        )
        self._given.update(window)
        return window

    def _arrived_window(self, replica_group: int, budget: int, ahead: bool) -> list[int]:
        """Return the next window in arrival order."""
        free = [index for index in self._ready if index not in self._given]
        mini_batch = min((self._mini_batches[index] for index in free), default=0)
        free = [index for index in free if self._mini_batches[index] == mini_batch]
        if (
            ahead
            and self._windows.replica_groups > 1
            and self._remaining(free, mini_batch) < 2 * self._windows.replica_groups * budget
        ):
            return []
        count = self._count_fitting(free, self._largest(replica_group, budget, free, mini_batch))
        for _ in range(1, self._joined(budget, free, mini_batch)):
            more = self._count_fitting(free[count:], budget)
            can_grow = count + more == len(free) and not self._windows.bubble
            if not more or can_grow or count + more > self._most:
                break  # nothing waits, or it can still grow, or is too large for one replica group
            count += more
        window = free[:count]
        self._tokens_given[mini_batch][replica_group] += sum(self._tokens[index] for index in window)
        return window

    def _largest(self, replica_group: int, budget: int, free: Sequence[int], mini_batch: int) -> int:
        """Return the largest number of tokens of the next window: `budget`, or less so that the replica groups finish
        the mini-batch together.

        A window has at most 1 / (2 · replica groups) of the tokens of the mini-batch that no replica group has yet.
        This is guided self-scheduling (Polychronopoulos and Kuck 1987) with the factor 1/2 of factoring (Hummel,
        Schonberg and Flynn 1992). It implements AsyncFlow's balance of tokens (§3.3). A row that is not ready counts
        with the mean of the ready rows. A single replica group always gets `budget`.
        """
        replica_groups = self._windows.replica_groups
        if replica_groups == 1 or not free:
            return budget
        mean = sum(self._tokens.values()) / len(self._ready)
        remaining = self._remaining(free, mini_batch)
        guided = remaining / (2 * replica_groups)
        if not self._windows.bubble:
            return min(budget, max(self._windows.least, int(guided)))
        size = max(guided, self._even(replica_group, budget, remaining, mini_batch))
        return budget if size + mean > budget else int(size + mean / 2)

    def _joined(self, budget: int, free: Sequence[int], mini_batch: int) -> int:
        """Return how many windows may be given as one. With several replica groups, none gets more than its share of
        the waiting rows, nor more than half of what `_largest` allows, because a slow replica group may hold another
        window ahead."""
        replica_groups = self._windows.replica_groups
        if replica_groups == 1:
            return self._windows.together
        waiting = sum(self._tokens[index] for index in free)
        share = min(waiting / replica_groups, self._remaining(free, mini_batch) / (4 * replica_groups))
        return min(self._windows.together, int(share / budget))

    def _remaining(self, free: Sequence[int], mini_batch: int) -> float:
        """Return the tokens of the mini-batch that no replica group has yet. A row that is not ready counts with the
        mean."""
        coming = max(0, (mini_batch + 1) * self._mini_batch - len(self._ready))
        mean = sum(self._tokens.values()) / max(1, len(self._ready))
        return sum(self._tokens[index] for index in free) + coming * mean

    def _even(self, replica_group: int, budget: int, remaining: float, mini_batch: int) -> float:
        """Return the tokens of each window of a replica group that runs a pipeline: its part of an equal share, in as
        few windows as the budget allows.

        Each window costs the bubble once, so the fewest windows of equal size finish first (chunks of equal size, where
        a chunk costs a fixed time: Kruskal and Weiss 1985). All replica groups then finish after share + windows ·
        bubble. If full windows were given as long as there are rows, one replica group would finish no sooner than
        that. A replica group that is within one bubble of its share counts as having reached it.
        """
        given = self._tokens_given[mini_batch]
        bubble = self._windows.bubble
        share = (remaining + sum(given)) / self._windows.replica_groups
        lacking = [share - one if not one or share - one > bubble else 0.0 for one in given]
        if not lacking[replica_group]:
            return bubble
        part = remaining * lacking[replica_group] / sum(lacking)
        return part / math.ceil(part / budget)

    def _ordered_window(self, replica_group: int, budget: int) -> list[int]:
        self._cut_windows(budget)
        number = replica_group + self._taken[replica_group] * self._windows.replica_groups
        mine = self._ordered[number :: self._windows.replica_groups][
            : self._windows.together if self._windows.bubble else 1
        ]
        mine = [one for one in mine if self._mini_batches[one[0]] == self._mini_batches[mine[0][0]]]
        self._taken[replica_group] += len(mine)
        return [index for one in mine for index in one]

    def window(self, index: int) -> int:
        """Return the number of a leased row's window in prompt order; 0 in arrival order."""
        return self._window_of.get(index, 0)

    def _cut_windows(self, budget: int) -> None:
        """Cut the next rows in prompt order into windows, for as long as the end of the next window is known."""
        while True:
            first = self._ordered[-1][-1] + 1 if self._ordered else 0
            border = (first // self._mini_batch + 1) * self._mini_batch
            last = first
            while last < border and last in self._tokens:
                last += 1
            ready = list(range(first, last))
            count = self._count_fitting(ready, budget)
            if not ready or (count == len(ready) and count < self._most and last < border):
                return
            self._window_of |= dict.fromkeys(ready[:count], len(self._ordered))
            self._ordered.append(ready[:count])

    def _count_fitting(self, indices: Sequence[int], budget: int) -> int:
        """Return how many of the first rows fit into a window. The first row always counts as fitting."""
        used = 0
        for count, index in enumerate(indices):
            used += self._tokens[index]
            if count and (used > budget or count == self._most):
                return count
        return len(indices)

    def finish_rows(self, indices: Iterable[int]) -> None:
        """Mark rows as done. Raises ValueError for a row that was not given out or is already done."""
        for index in indices:
            if index not in self._given or index in self._done:
                raise ValueError(f"row {index} was not leased, or is already done")
            self._done.add(index)

    @property
    def replica_groups(self) -> int:
        """Number of replica groups that take windows independently."""
        return self._windows.replica_groups

    @property
    def _most(self) -> int:
        """Largest number of rows in a window, so that every replica group gets part of each mini-batch."""
        several = self._windows.updates > 1
        return -(-self._mini_batch // self.replica_groups) if several else self.expected

    def begin_again(self, windows: Windows | None = None) -> None:
        """Forget what was given and done: the stage repeats the step from its first row. `windows`: how rows are given
        out from now on, with the same number of mini-batches; None: as before."""
        self._windows = windows or self._windows
        self._given.clear()
        self._done.clear()
        self._ordered.clear()
        self._window_of.clear()
        self._taken = [0] * self._windows.replica_groups
        self._tokens_given = [[0] * self._windows.replica_groups for _ in self._tokens_given]

    @property
    def ready(self) -> int:
        """Number of rows that have become ready."""
        return len(self._ready)

    @property
    def done(self) -> int:
        """Number of rows that the stage has finished."""
        return len(self._done)

    @property
    def is_over(self) -> bool:
        """Whether the stage has finished all rows of the step."""
        return len(self._done) == self.expected
