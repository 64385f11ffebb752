"""The ledger of leases, with a policy for each kind of consumer: our own trainer's leases are bound to its attempt,
those of programs outside have a deadline. Both answer the same message (`Lease`) with the same window."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.errors import ServiceConflict
from engine.launcher.sample_queue import SampleQueue
from engine.wire.messages import Lease, Window
from engine.wire.sealed import SealedGroup


class Held(NamedTuple):
    """A window that is leased and not acknowledged yet."""

    queue: SampleQueue
    window: Window
    given: float
    """Monotonic time."""


class AttemptLeases:
    """The leases of our own trainer's units.

    A window is in one lease at a time, and counts with the one acknowledgement of its last lease. Here it has one lease
    only: the gradient of a unit that dies is lost, so the run stops, and its next attempt does the step again.
    """

    lease_s: float | None = None
    """Seconds after which a window may be given again; None: never."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._held: dict[int, Held] = {}

    def give(self, queue: SampleQueue, request: Lease) -> Window | None:
        """Lease the queue's next window; None if there is none yet."""
        groups = tuple(queue.lease(request.unit or 0, request.budget))
        return self._hold(queue, groups) if groups else None

    def _hold(self, queue: SampleQueue, groups: tuple[SealedGroup, ...], deliveries: int = 1) -> Window:
        window = Window(
            groups=groups,
            batch=queue.batch,
            lease=next(self._numbers),
            lease_s=self.lease_s,
            deliveries=deliveries,
        )
        self._held[window.lease] = Held(queue, window, self._clock())
        return window

    def window(self, number: int) -> Window:
        """The window of a lease that is held."""
        return self._held[number].window

    def acknowledge(self, request: Lease) -> list[SealedGroup]:
        """The windows of `request.trained` are trained. Return their groups that were not acknowledged before.

        Raises ValueError for a lease that the unit does not hold.
        """
        return [group for number in request.trained for group in self._acknowledge(number, request)]

    def _acknowledge(self, number: int, request: Lease) -> Sequence[SealedGroup]:
        if (held := self._held.pop(number, None)) is None:
            raise ValueError(f"unit {request.unit} of the trainer holds no lease {number} of step {request.step}")
        held.queue.acknowledge([group.index for group in held.window.groups], request.unit or 0)
        return held.window.groups


class DeadlineLeases(AttemptLeases):
    """The leases of programs outside. After its deadline a window is given to the next program that asks: a program may
    see a group more than once, and still it counts once."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`lease_s`: seconds that a program has for a window."""
        super().__init__(clock)
        self.lease_s: float = lease_s
        self._acknowledged: dict[int, int] = {}
        """Number of each acknowledged lease → its step."""
        self._replaced: dict[int, tuple[int, str]] = {}
        """Number of each lease that counts no more → its step, and why."""

    def give(self, queue: SampleQueue, request: Lease) -> Window | None:
        """Lease a window whose last lease is over its deadline, else the queue's next one; None if there is none.

        A window that is given again has the groups of the first time, whatever the budget."""
        now = self._clock()
        for number, held in self._held.items():
            if held.queue is queue and now - held.given > self.lease_s:
                del self._held[number]
                why = f"it was not acknowledged within {self.lease_s:g} s (service.lease_s), and its groups were given"
                self._replaced[number] = (queue.step, f"{why} to {request.consumer!r}")
                return self._hold(queue, held.window.groups, held.window.deliveries + 1)
        return super().give(queue, request)

    def _acknowledge(self, number: int, request: Lease) -> Sequence[SealedGroup]:
        """Again is as once, and late is in time if nobody was given the groups since.

        Raises ServiceConflict if they were given again, or if there is no such lease.
        """
        if number in self._acknowledged:
            return ()
        if number in self._replaced:
            step, why = self._replaced[number]
            raise ServiceConflict(f"lease {number} of step {step}: {why}; drop the gradient of these groups")
        if number not in self._held:
            raise ServiceConflict(f"there is no lease {number}; the service may have been started again since")
        self._acknowledged[number] = self._held[number].queue.step
        return super()._acknowledge(number, request)

    def begin_again(self, queue: SampleQueue) -> None:
        """A trainer begins the queue's step again: no lease of it counts, and all its groups are given again."""
        queue.begin_again()
        old = [number for number, held in self._held.items() if held.queue is queue]
        old += [number for number, step in self._acknowledged.items() if step == queue.step]
        for number in old:
            self._held.pop(number, None)
            self._acknowledged.pop(number, None)
            self._replaced[number] = (queue.step, "the trainer has begun the step again since")

    def forget(self, step: int) -> None:
        """Forget the leases of a step that is over."""
        self._acknowledged = {one: of for one, of in self._acknowledged.items() if of != step}
        self._replaced = {one: of for one, of in self._replaced.items() if of[0] != step}
