"""One rollout instance as the pool sees it. Only `Instance` changes its own state."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar, cast

from engine.orchestrator.pool.instance_client import InstanceClient
from engine.run.instance_process import InstanceProcess
from engine.run.process import Child
from engine.run.trace import Trace
from engine.types import JsonObject
from engine.wire.rollout_messages import Load

State = Literal["starting", "updating", "serving", "draining", "out", "gone"]
"""A state as GET /status, GET /metrics and the timeline show it."""


WORKING: tuple[State, ...] = ("serving", "updating")
"""States that count in pool_size."""

NEXT = {
    "starting": ("updating", "serving", "out", "gone"),
    "updating": ("updating", "serving", "out", "gone"),
    "serving": ("updating", "draining", "out", "gone"),
    "draining": ("gone",),
    "out": ("starting", "gone"),
    "gone": (),
}
"""Every allowed transition. `Instance` explains the states."""

FAILURES = 3
"""Number of failures in a row after which an instance is left out. The third time that it is left out without a good
response in between, it is given up."""
SILENCES = 12
"""Number of times in a row that an instance may be silent during a publish or its check, as on a machine that is busy
with something else. Then it is given up."""
SMOOTHING = 0.3
"""Weight of the newest value in an instance's averages."""


def smooth_average(average: float | None, newest: float) -> float:
    """Return the average updated with the newest value, or the newest value if there is no average yet."""
    return newest if average is None else (1 - SMOOTHING) * average + SMOOTHING * newest


def has_room(responses: int, slots: int, size: int) -> bool:
    """Whether `size` responses may be sent to an instance with `slots` that has `responses` in flight: each needs a
    slot. Of more responses than there are slots only one does, and the others wait on the instance."""
    return responses + (size if size <= slots else 1) <= slots


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


@dataclass(eq=False)
class Place:
    """A group's slots on an instance, one for each response that is not finished."""

    instance: Instance
    failed: bool = False
    """Whether a request of the group has failed. Further ones do not count against the instance again."""


@dataclass(eq=False)
class Instance:
    """One instance of the pool. Pool, health monitor and weight sync query it; only its own methods write its fields.

    | state | meaning | takes prompts | in pool_size | gets the next version | may go to |
    |---|---|---|---|---|---|
    | starting | waits for the run's weights | no | no | yes | updating, serving, out, gone |
    | updating | a publish gives it weights | no | yes | yes | updating, serving, out, gone |
    | serving | takes prompts | yes | yes | yes | updating, draining, out, gone |
    | draining | asked to leave; finishes what it holds | no | no | no | gone |
    | out | excluded; may come back | no | no | no | starting, gone |
    | gone | never comes back as this object | no | no | no | |

    The methods `admit` to `depart` change the state. Any other transition is a bug and raises RuntimeError.

    A starting instance gets the next version only once it has passed its check.

    Version: None until `record_version`. `exclude` resets it to None, because an update may have been interrupted. So
    an instance with a version holds all of that version; an updating instance held it before the update.

    Places: one for each group in flight, with a slot for each of its responses. Only a serving instance gives places
    (`take_place`), never with more slots than the limit, unless a single group has more responses. Each slot is freed
    when its response ends (`free_slot`), and each place is given back exactly once (`give_back`), whatever the
    instance's state is by then.
    """

    client: InstanceClient
    declared: InstanceProcess | None = None
    """The instance's process if this run started it; None if it joined from outside."""
    trace: Trace | None = None
    version: int | None = field(default=None, init=False)
    """Weight version that the instance was brought to."""
    leaving: bool = field(default=False, init=False)
    """Whether the instance asked to leave. It then gets no more groups. An update in progress still completes."""
    reason: str = field(default="", init=False)
    """Why the instance was last excluded."""
    excluded: bool = field(default=False, init=False)
    """Whether the instance was excluded and has not served since."""
    group_s: float | None = field(default=None, init=False)
    """Seconds per group, smoothed (groups that run at the same time share them); None before the first group."""
    met: bool = field(default=False, init=False)
    """Whether the instance has ever answered. A weight update does not wait for one that has not: its address may be
    wrong."""
    checked: bool = field(default=False, init=False)
    """Whether the instance has passed the check of one that arrives (`Pool.check_arrivals`)."""
    load: Load | None = field(default=None, init=False)
    """The instance's last answer to GET /load."""
    tokens_per_s: float = field(default=0.0, init=False)
    """Tokens generated per second between the last two answers to GET /load."""
    failures: int = field(default=0, init=False)
    """Number of failures in a row, of groups, updates and checks."""
    _state: str = field(default="starting", init=False)
    _places: dict[Place, int] = field(default_factory=dict, init=False)
    """The slots that each group in flight still holds."""
    _times_out: int = field(default=0, init=False)
    """How often it was left out for failures since its last good response."""
    _gone: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self._last_heard = time.monotonic()
        self._loaded = time.monotonic()
        self._since = time.time()

    @property
    def name(self) -> str:
        """Unique name within the pool."""
        return self.client.name

    @property
    def child(self) -> Child | None:
        """The instance's process, if this run started it."""
        return None if self.declared is None else self.declared.child

    @property
    def restarts(self) -> int:
        """How often the process was restarted."""
        return 0 if self.declared is None else self.declared.restarts

    @property
    def dead(self) -> bool:
        """Whether the process has ended, as far as this run can tell."""
        return self.child is not None and not self.child.alive

    # its state ------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The state, as shown to users."""
        return cast(State, self._state)

    @property
    def updating(self) -> bool:
        """Whether a publish is giving the instance weights, and it has not been excluded since this began."""
        return self._state == "updating"

    @property
    def takes_prompts(self) -> bool:
        """Whether the instance takes prompts now."""
        return self._state == "serving"

    @property
    def gets_version(self) -> bool:
        """Whether a publish that begins now includes the instance."""
        return self.met and self.checked and self._state in ("starting", "updating", "serving")

    @property
    def lives(self) -> bool:
        """Whether the instance takes prompts now, or can do so after an update."""
        return self.takes_prompts or "serving" in NEXT[self._state]

    @property
    def counts(self) -> bool:
        """Whether the instance keeps the run from giving up: it lives, and has answered at least once."""
        return self.lives and self.met

    @property
    def may_depart(self) -> bool:
        """Whether the instance asked to leave and has nothing to finish, neither an update nor a group."""
        return self.leaving and not self.updating and not (self.state == "draining" and self._places)

    def admit(self) -> None:
        """Let the instance take prompts, since it holds the right weights."""
        self._go("serving")
        self.excluded = False
        self.failures = 0

    def begin_update(self) -> None:
        """Begin a publish that gives the instance weights."""
        self._go("updating")

    def wait_for_weights(self) -> None:
        """Let the instance, which answers again, wait for the run's weights. Requests that were sent since it was
        excluded are lost, because other weights may have sampled them."""
        self._go("starting")
        self.client.end_calls("it waits for weights")

    def exclude(self, reason: str) -> None:
        """Stop sending prompts to the instance. Every call to it in progress ends with Abandoned."""
        self._go("out")
        self.reason = reason
        self.excluded = True
        self.version = None
        self.failures = 0
        self.client.end_calls(reason)

    def drain(self) -> None:
        """Let the instance leave: it gets no new groups and finishes what it holds."""
        self.leaving = True
        if self.takes_prompts:
            self._go("draining")

    def depart(self, reason: str) -> None:
        """End every call in progress with Abandoned, and retire this object for good."""
        self._go("gone")
        self.reason = self.child.how_it_ended() if self.child is not None and self.dead else reason
        self.client.end_calls(self.reason)
        self._gone.set()

    async def wait_until_gone(self, timeout_s: float) -> None:
        """Wait until the instance is gone, or until `timeout_s` has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._gone.wait()

    def _go(self, state: str) -> None:
        if state not in NEXT[self._state]:
            raise RuntimeError(f"instance {self.name}: no transition from {self._state} to {state}")
        if state != self._state:
            self.draw_state()
        self._state = state

    def draw_state(self) -> None:
        """Add the time spent in the current state so far to the timeline."""
        now = time.time()
        if self.trace is not None:
            self.trace.add_span(self.state, self._since, now, lane=f"pool {self.name}")
        self._since = now

    # its places -----------------------------------------------------------------------------------

    @property
    def groups(self) -> int:
        """Number of groups in flight on the instance."""
        return len(self._places)

    @property
    def responses(self) -> int:
        """Number of responses in flight on the instance."""
        return sum(self._places.values())

    def take_place(self, slots: int, size: int) -> Place:
        """Take a slot for each of `size` responses; the instance has `slots` (`has_room`)."""
        if not self.takes_prompts or not has_room(self.responses, slots, size):
            raise RuntimeError(
                f"instance {self.name}: no slots for {size} responses: {self._state}, {self.responses} in flight"
            )
        place = Place(self)
        self._places[place] = size
        return place

    def free_slot(self, place: Place) -> None:
        """Free the slot of a response that has ended."""
        self._places[place] -= 1

    def give_back(self, place: Place) -> None:
        """Give back the place of a group that is no longer on the instance."""
        del self._places[place]

    def record_group(self, seconds: float, beside: float) -> None:
        """Record that a group took `seconds` while responses of `beside` groups ran, including its own."""
        self.group_s = smooth_average(self.group_s, seconds / max(1, beside))

    # its weights ----------------------------------------------------------------------------------

    def record_version(self, version: int) -> None:
        """Record that the instance was brought to this version. If it has been excluded since, it keeps no version."""
        if self._state not in ("out", "gone"):
            self.version = version

    def hold_responses(self) -> None:
        """Hold back the instance's responses: its new weights have not been compared with the trainer's yet."""
        self.client.hold_responses()

    def release_responses(self) -> None:
        """Release the instance's responses, since it computes as the trainer does. Nothing happens if it has been
        excluded since."""
        if self._state in ("serving", "draining"):
            self.client.release_responses()

    # what it answers ------------------------------------------------------------------------------

    @property
    def silence_s(self) -> float:
        """Seconds since the instance last answered."""
        return time.monotonic() - self._last_heard

    def record_answer(self) -> bool:
        """Record that the instance answered. Return whether this was the first time."""
        self._last_heard = time.monotonic()
        first = not self.met
        self.met = True
        return first

    def record_success(self) -> None:
        """Record that the instance gave a good response."""
        self.failures = 0
        self._times_out = 0

    def record_failure(self) -> bool:
        """Record a failure. Return whether the instance must be left out."""
        self.failures += 1
        return self.failures >= FAILURES

    def record_left_out(self, silent: bool = False) -> bool:
        """Record that the instance is left out, for failures or because it was `silent` during a publish or its check.
        Return whether it must be given up."""
        self._times_out += 1 if silent else SILENCES // FAILURES
        return self._times_out >= SILENCES

    def record_load(self, load: Load) -> None:
        """Record an answer to GET /load."""
        now = time.monotonic()
        if self.load is not None and now > self._loaded:
            generated = load.generated_tokens - self.load.generated_tokens
            self.tokens_per_s = max(0.0, generated) / (now - self._loaded)
        self.load = load
        self._loaded = now

    def holds(self, least: int | None) -> bool:
        """Whether the instance has this weight version or a later one; None: any."""
        return least is None or (self.version is not None and self.version >= least)

    def status(self) -> JsonObject:
        """Return the part of GET /status about this instance."""
        return {
            "name": self.name,
            "url": self.client.url,
            "state": self.state,
            "reason": self.reason,
            "failures": self.failures,
            "version": self.version,
            "restarts": self.restarts,
            "groups": self.groups,
            "group_s": self.group_s,
            "running": self.load.running if self.load is not None else None,
            "waiting": self.load.waiting if self.load is not None else None,
            "tokens_per_s": self.tokens_per_s,
        }
