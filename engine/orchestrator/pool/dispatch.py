"""Slots on the instances: which groups wait for them, and which instance takes the next group."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.errors import MetronomeError
from engine.orchestrator.pool.instance import Instance, Place, has_room


class InstanceLoad(Protocol):
    """What the choice of an instance depends on."""

    @property
    def responses(self) -> int:
        """Number of responses in flight on the instance."""

    @property
    def group_s(self) -> float | None:
        """Seconds per group; None before the first group."""


One = TypeVar("One", bound=InstanceLoad)


def soonest_instance(serving: Sequence[One], slots: int, size: int, avoid: Collection[One] = ()) -> One | None:
    """Return the instance with room for `size` responses that will probably finish them first; None if none has room.

    Each has `slots` (`has_room`). Instances in `avoid` are used only if no others serve. One that has finished no group
    yet counts as fast as the fastest.
    """
    others = [instance for instance in serving if instance not in avoid] or serving
    free = [instance for instance in others if has_room(instance.responses, slots, size)]
    untried = min((instance.group_s for instance in serving if instance.group_s is not None), default=1.0)
    return min(free, key=lambda one: (one.responses + size) * (one.group_s or untried), default=None)


@dataclass(frozen=True)
class _Waiter:
    """A caller that waits for a place."""

    place: asyncio.Future[Place]
    size: int
    """Number of responses that are sent together."""
    avoid: Collection[Instance]
    least: int | None


class Dispatcher:
    """Gives each group to the instance that will probably finish it first. Callers get places in the order of
    asking."""

    def __init__(self, instances: list[Instance], slots: int, give_back: Callable[[Place], None]) -> None:
        """`instances`: the pool's own list, which changes as instances come and go. `slots`: responses in flight on
        each. `give_back`: takes a place whose waiter was cancelled."""
        self._instances = instances
        self._slots = slots
        self._give_back = give_back
        self._waiting: deque[_Waiter] = deque()

    async def wait_for_place(self, avoid: Collection[Instance], first: bool, least: int | None, size: int) -> Place:
        """Wait for a place for `size` responses. The time limits are those of the requests in progress and
        rollout.wait_s (`fail_waiters`).

        `avoid`: use other instances if any serve. `first`: go before everyone who is already waiting. `least`: use an
        instance with this weight version or a later one.
        """
        asked = _Waiter(asyncio.get_running_loop().create_future(), size, avoid, least)
        (self._waiting.appendleft if first else self._waiting.append)(asked)
        self.hand_out()
        try:
            return await asked.place
        except asyncio.CancelledError:
            place = asked.place
            if place.done() and not place.cancelled() and place.exception() is None:
                self._give_back(place.result())
            else:
                self.hand_out()  # those behind it may need fewer slots
            raise

    def hand_out(self) -> None:
        """Give places to the waiters in the order of asking, until no place is left."""
        while self._waiting:
            asked = self._waiting[0]
            if not asked.place.done():
                if (best := self._pick(asked)) is None:
                    break
                asked.place.set_result(best.take_place(self._slots, asked.size))
            self._waiting.popleft()

    def fail_waiters(self, error: MetronomeError) -> None:
        """Give all waiters this error instead of a place."""
        while self._waiting:
            place = self._waiting.popleft().place
            if not place.done():
                place.set_exception(error)

    def _pick(self, asked: _Waiter) -> Instance | None:
        serving = [instance for instance in self._instances if instance.takes_prompts]
        if (least := asked.least) is not None:
            serving = [instance for instance in serving if instance.version is not None and instance.version >= least]
        return soonest_instance(serving, self._slots, asked.size, asked.avoid)
