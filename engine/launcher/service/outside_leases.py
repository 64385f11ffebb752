"""Leases of programs outside: each has a deadline, after which its groups are given again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import ServiceConflict
from engine.launcher.sample_queue import SampleQueue
from engine.wire.messages import Window
from engine.wire.sealed import SealedGroup
from engine.wire.service_messages import LeasedWindow


@dataclass(frozen=True)
class OutsideLease:
    """What a program holds."""

    consumer: str
    queue: SampleQueue
    groups: tuple[SealedGroup, ...]
    given: float
    """Monotonic time."""
    deliveries: int


class OutsideLeases:
    """The ledger of leases to programs outside.

    A window is in one lease at a time. It is acknowledged to the sample queue once, by the last lease that has it: so
    inside a step every group counts once, although a program may see it more than once.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`lease_s`: seconds that a program has for a window."""
        self._lease_s = lease_s
        self._clock = clock
        self._numbers = itertools.count(1)
        self._held: dict[int, OutsideLease] = {}
        self._acknowledged: dict[int, int] = {}
        """Number of each acknowledged lease → its step."""
        self._replaced: dict[int, tuple[int, str]] = {}
        """Number of each lease that counts no more → its step, and why."""

    def give(self, queue: SampleQueue, consumer: str, budget: int) -> LeasedWindow | None:
        """Lease a window whose last lease is over its deadline, else the queue's next one; None if there is none.

        A window that is given again has the groups of the first time, whatever the budget."""
        now = self._clock()
        for number, lease in self._held.items():
            if lease.queue is queue and now - lease.given > self._lease_s:
                del self._held[number]
                why = f"it was not acknowledged within {self._lease_s:g} s (service.lease_s), and its groups were given"
                self._replaced[number] = (queue.step, f"{why} to {consumer!r}")
                return self._lease(consumer, queue, lease.groups, lease.deliveries + 1)
        window = tuple(queue.lease(0, budget))
        return self._lease(consumer, queue, window, 1) if window else None

    def _lease(
        self, consumer: str, queue: SampleQueue, groups: tuple[SealedGroup, ...], deliveries: int
    ) -> LeasedWindow:
        number = next(self._numbers)
        self._held[number] = OutsideLease(
            consumer=consumer, queue=queue, groups=groups, given=self._clock(), deliveries=deliveries
        )
        return LeasedWindow(
            lease=number, window=Window(groups, queue.batch), lease_s=self._lease_s, deliveries=deliveries
        )

    def acknowledge(self, number: int) -> None:
        """The groups of a lease are trained. Again is as once, and late is in time if nobody was given them since.

        Raises ServiceConflict if they were given again, or if there is no such lease.
        """
        if number in self._acknowledged:
            return
        if number in self._replaced:
            step, why = self._replaced[number]
            raise ServiceConflict(f"lease {number} of step {step}: {why}; drop the gradient of these groups")
        if number not in self._held:
            raise ServiceConflict(f"there is no lease {number}; the service may have been started again since")
        lease = self._held.pop(number)
        lease.queue.acknowledge([group.index for group in lease.groups], 0)
        self._acknowledged[number] = lease.queue.step

    def begin_again(self, queue: SampleQueue) -> None:
        """A trainer begins the queue's step again: no lease of it counts, and all its groups are given again."""
        queue.begin_again()
        old = [number for number, lease in self._held.items() if lease.queue is queue]
        old += [number for number, step in self._acknowledged.items() if step == queue.step]
        for number in old:
            self._held.pop(number, None)
            self._acknowledged.pop(number, None)
            self._replaced[number] = (queue.step, "the trainer has begun the step again since")

    def forget(self, step: int) -> None:
        """Forget the leases of a step that is over."""
        self._acknowledged = {one: of for one, of in self._acknowledged.items() if of != step}
        self._replaced = {one: of for one, of in self._replaced.items() if of[0] != step}
