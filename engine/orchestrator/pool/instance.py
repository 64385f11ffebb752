"""One rollout instance as the pool sees it, the only writer of its own state."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Literal, cast

from engine.orchestrator.pool.circuit_breaker import CircuitBreaker
from engine.orchestrator.pool.instance_client import InstanceClient
from engine.run.instance_process import InstanceProcess
from engine.run.process import Child
from engine.run.trace import Trace
from engine.types import JsonObject
from engine.wire.rollout_messages import Load

State = Literal["starting", "updating", "serving", "draining", "silent", "gone"]
"""A state as GET /status, GET /metrics and the timeline show it."""


WORKING: tuple[State, ...] = ("serving", "updating")
"""States that count in pool_size."""

NEXT = {
    "starting": ("updating", "catching_up", "serving", "silent", "gone"),
    "updating": ("updating", "serving", "silent", "gone"),
    "catching_up": ("serving", "silent", "gone"),
    "serving": ("updating", "draining", "silent", "gone"),
    "draining": ("gone",),
    "silent": ("starting", "catching_up", "silent", "gone"),
    "gone": (),
}
"""Every transition. `Instance` says what a state means."""

SMOOTHING = 0.3
"""Weight of the newest figure in an instance's averages."""


def smooth_average(average: float | None, newest: float) -> float:
    """The average with the newest figure taken in; the newest alone if there is none yet."""
    return newest if average is None else (1 - SMOOTHING) * average + SMOOTHING * newest


@dataclass(frozen=True, eq=False)
class Place:
    """Room for one group on an instance."""

    instance: Instance
    trial: bool
    """Whether only one request may be sent: its breaker was open."""


@dataclass(eq=False)
class Instance:
    """One instance of the pool. Pool, health monitor and weight sync ask it; its methods alone write its fields.

    | state | meaning | takes prompts | in pool_size | gets the next version | may go to |
    |---|---|---|---|---|---|
    | starting | has no weights of the run yet | no | no | yes | updating, catching_up, serving, silent, gone |
    | updating | a publish gives it weights | no | yes | yes | updating, serving, silent, gone |
    | catching_up | gets the current weights on its own; shown as updating | no | yes | no | serving, silent, gone |
    | serving | takes prompts | yes | yes | yes | updating, draining, silent, gone |
    | draining | asked to leave; finishes what it holds | no | no | no | gone |
    | silent | excluded; may come back | no | no | no | starting, catching_up, silent, gone |
    | gone | never comes back as this object | no | no | no | |

    It goes from state to state by the methods `admit` to `depart`. Any other transition is a mistake of ours and raises
    RuntimeError.

    Version: None until `hold`. `exclude` and `begin_catch_up` set it back to None, because an update may have been
    broken off. So an instance with a version holds the whole of it; one that is updating held it before.

    Places: one for each group in flight. Only a serving instance gives one (`take_place`), never more than the limit.
    Each is given back exactly once (`give_back`), in whatever state the instance is by then.
    """

    client: InstanceClient
    declared: InstanceProcess | None = None
    """Its process, when this run started it; None: it joined from outside."""
    trace: Trace | None = None
    version: int | None = field(default=None, init=False)
    """Weight version that it was brought to."""
    leaving: bool = field(default=False, init=False)
    """It asked to leave: it gets no more groups. An update under way goes on until its end."""
    reason: str = field(default="", init=False)
    """Why it was last excluded."""
    excluded: bool = field(default=False, init=False)
    """Whether it was excluded and has not served since."""
    group_s: float | None = field(default=None, init=False)
    """Seconds per group at its pace (groups that run side by side share them), smoothed; None before the first."""
    met: bool = field(default=False, init=False)
    """Whether it has ever answered: a wrong address holds up no weight update."""
    load: Load | None = field(default=None, init=False)
    """Its last answer to GET /load."""
    tokens_per_s: float = field(default=0.0, init=False)
    """Generated between its last two answers."""
    retry: float = field(default=0.0, init=False)
    """When the next attempt to bring it to the weights is due (monotonic)."""
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker, init=False)
    _state: str = field(default="starting", init=False)
    _places: set[Place] = field(default_factory=set, init=False)
    _failed_attempts: int = field(default=0, init=False)
    """Times in a row that it could not be brought to the weights."""
    _breaches: int = field(default=0, init=False)
    """Replies that broke the protocol."""
    _busy_since: float | None = field(default=None, init=False)
    """Since when it has refused every request as one that is paused (monotonic)."""
    _gone: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self._last_heard = time.monotonic()
        self._loaded = time.monotonic()
        self._since = time.time()

    @property
    def name(self) -> str:
        """Unique among the pool's instances."""
        return self.client.name

    @property
    def child(self) -> Child | None:
        """Its process, when this run started it."""
        return None if self.declared is None else self.declared.child

    @property
    def restarts(self) -> int:
        """How often its process was started again."""
        return 0 if self.declared is None else self.declared.restarts

    @property
    def dead(self) -> bool:
        """Whether its process ended, as far as this run can see that."""
        return self.child is not None and not self.child.alive

    # its state ------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Where it is in its life, as shown."""
        return "updating" if self._state == "catching_up" else cast(State, self._state)

    @property
    def updating(self) -> bool:
        """Whether a publish gives it weights: it has not been excluded since that began."""
        return self._state == "updating"

    @property
    def takes_prompts(self) -> bool:
        """Whether it takes prompts now."""
        return self._state == "serving"

    @property
    def gets_version(self) -> bool:
        """Whether a publish that begins has it as a member."""
        return self.met and self._state in ("starting", "updating", "serving")

    @property
    def lives(self) -> bool:
        """Whether it takes prompts now, or after its update."""
        return self.takes_prompts or "serving" in NEXT[self._state]

    @property
    def counts(self) -> bool:
        """Whether it keeps the run from giving up: it lives, and is no address that has never answered."""
        return self.lives and self.met

    @property
    def may_depart(self) -> bool:
        """Whether it asked to leave and has nothing to finish: neither an update nor a group."""
        return self.leaving and not self.updating and not (self.state == "draining" and self._places)

    def admit(self) -> None:
        """It holds the weights it should: it takes prompts."""
        self._go("serving")
        self._failed_attempts = 0
        self.excluded = False

    def begin_update(self) -> None:
        """A publish gives it weights."""
        self._go("updating")

    def begin_catch_up(self) -> None:
        """It is brought to the current weights on its own."""
        self._go("catching_up")
        self.version = None

    def wait_for_publish(self) -> None:
        """It answers again before any version was published: it waits for the first one."""
        self._go("starting")

    def exclude(self, reason: str) -> None:
        """It takes no more prompts. Every call to it that is under way ends with InstanceGone."""
        self._go("silent")
        self.reason = reason
        self.excluded = True
        self.version = None
        self._busy_since = None
        self.client.cut(reason)

    def drain(self) -> None:
        """It asked to leave: it gets no new groups and finishes what it holds."""
        self.leaving = True
        if self.takes_prompts:
            self._go("draining")

    def depart(self, reason: str) -> None:
        """It never comes back as this object. Every call to it that is under way ends with InstanceGone."""
        self._go("gone")
        self.reason = self.child.how_it_ended() if self.child is not None and self.dead else reason
        self.client.cut(self.reason)
        self._gone.set()

    async def wait_until_gone(self, timeout_s: float) -> None:
        """Until it is gone, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._gone.wait()

    def _go(self, state: str) -> None:
        if state not in NEXT[self._state]:
            raise RuntimeError(f"instance {self.name}: no transition from {self._state} to {state}")
        if state != self._state:
            self.draw()
        self._state = state

    def draw(self) -> None:
        """Put the current state's period so far on the timeline."""
        now = time.time()
        if self.trace is not None:
            self.trace.add(self.state, self._since, now, lane=f"pool {self.name}")
        self._since = now

    # its places -----------------------------------------------------------------------------------

    @property
    def groups(self) -> int:
        """Groups in flight on it."""
        return len(self._places)

    def take_place(self, limit: int) -> Place:
        """Room for one more group, of at most `limit`."""
        if not self.takes_prompts or self.groups >= limit:
            raise RuntimeError(f"instance {self.name}: no place for a group: {self._state}, {self.groups} in flight")
        place = Place(self, self.breaker.begin())
        self._places.add(place)
        return place

    def give_back(self, place: Place) -> None:
        """The group is no longer on it."""
        self._places.remove(place)
        if place.trial:
            self.breaker.give_back()

    def finished(self, seconds: float, beside: int) -> None:
        """A group took so long beside so many (itself included)."""
        self.group_s = smooth_average(self.group_s, seconds / max(1, beside))

    # its weights ----------------------------------------------------------------------------------

    def hold(self, version: int) -> None:
        """It was brought to this version. One that was excluded meanwhile keeps none."""
        if self._state not in ("silent", "gone"):
            self.version = version

    def distrust(self) -> None:
        """It gets weights that are not compared with the trainer's yet: its responses are held back."""
        self.client.distrust()

    def trust(self, anew: bool = False) -> None:
        """It computes as the trainer does: its responses may go. `anew`: after it caught up, so that what was asked of
        it before is lost; else nothing happens if it was excluded meanwhile."""
        if anew or self._state in ("serving", "draining"):
            self.client.trust(anew)

    def failed_attempt(self, pause_s: float) -> int:
        """It could not be brought to the weights: the next attempt waits for `pause_s`, doubled for each failure.
        How many failed in a row."""
        self._failed_attempts += 1
        self.retry = time.monotonic() + pause_s * 2**self._failed_attempts
        return self._failed_attempts

    # what it answers ------------------------------------------------------------------------------

    @property
    def silence_s(self) -> float:
        """Seconds since it last answered."""
        return time.monotonic() - self._last_heard

    def heard(self) -> bool:
        """It answered; whether it did so for the first time."""
        self._last_heard = time.monotonic()
        first = not self.met
        self.met = True
        return first

    def answered(self) -> None:
        """It answered a request as it should."""
        self._busy_since = None
        self.breaker.success()

    def breached(self) -> int:
        """It sent a reply that breaks the protocol; how many it has sent."""
        self._breaches += 1
        return self._breaches

    def refused(self) -> float:
        """It refused a request as one that is paused; for how many seconds it has refused all."""
        now = time.monotonic()
        self._busy_since = now if self._busy_since is None else self._busy_since
        return now - self._busy_since

    def loaded(self, load: Load) -> None:
        """Take in an answer to GET /load."""
        now = time.monotonic()
        if self.load is not None and now > self._loaded:
            generated = load.generated_tokens - self.load.generated_tokens
            self.tokens_per_s = max(0.0, generated) / (now - self._loaded)
        self.load = load
        self._loaded = now

    def status(self) -> JsonObject:
        """What GET /status says of it."""
        return {
            "name": self.name,
            "url": self.client.url,
            "state": self.state,
            "reason": self.reason,
            "breaker": self.breaker.state,
            "version": self.version,
            "restarts": self.restarts,
            "groups": self.groups,
            "group_s": self.group_s,
            "running": self.load.running if self.load is not None else None,
            "waiting": self.load.waiting if self.load is not None else None,
            "tokens_per_s": self.tokens_per_s,
        }
