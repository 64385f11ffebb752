"""The rollout instances of a run: which ones take prompts, and how they join, leave and come back.

`InstanceProcesses` holds the instances that a run starts itself: their processes, addresses and restarts.

The pool knows nothing of the health monitor or of what a publish does. Both query the pool, and tell it when to admit
or exclude an instance. A new instance waits in `arrived` for the monitor.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp

from engine.config import Config
from engine.errors import BadInput, MetronomeError, ProcessDied, WeightSyncError, counted
from engine.model.shape import check_content
from engine.orchestrator.pool.instance import FAILURES, SILENCES, WORKING, Instance, Place, soonest_instance
from engine.orchestrator.pool.instance_client import Abandoned, BrokenReply, InstanceClient
from engine.orchestrator.run_events import RunEvents
from engine.run.commands import instance_command
from engine.run.instance_process import InstanceProcess
from engine.run.limits import loading_s
from engine.run.process import Child, stop_all
from engine.run.trace import Trace
from engine.wire.access_token import VARIABLE, own_token
from engine.wire.address import http_url


class InstanceProcesses:
    """Starts the processes of the declared instances, restarts them if they die, and stops them."""

    def __init__(self, config: Config, model: Path, folder: Path) -> None:
        """`model`: a Hugging Face folder. Logs and addresses are written to `folder`/logs, profiles (train.profile) to
        `folder`/profile."""
        self._config = config
        self._model = model
        self._logs = folder / "logs"
        self._profiles = (folder / "profile").resolve() if config.train.profile else None
        self.declared: list[InstanceProcess] = []
        self.token = own_token()
        """Access token of the instances that are started here."""

    def spawn(self, count: int) -> None:
        """Start `count` instances, without waiting for them."""
        for number in range(count):
            port_file = self._logs / f"instance-{number}.address"
            self.declared.append(InstanceProcess(number, self._child(number, port_file), port_file))

    def restart(self, one: InstanceProcess) -> None:
        """Restart the process of an instance."""
        one.restarts += 1
        one.faults += 1
        one.began = time.monotonic()
        one.child = self._child(one.number, one.port_file)

    def _child(self, number: int, port_file: Path) -> Child:
        port_file.unlink(missing_ok=True)
        name = f"instance-{number}"
        command, env = instance_command(
            config=self._config, model=self._model, name=name, number=number, port_file=port_file
        )
        if self._profiles is not None:
            command += ["--profile", str(self._profiles)]
        return Child(name, command, self._logs / f"{name}.log", env | {VARIABLE: self.token})

    async def close(self) -> None:
        """Stop all instances."""
        await asyncio.to_thread(stop_all, [one.child for one in self.declared])


Found = TypeVar("Found")


Check = Callable[[Instance], Awaitable[None]]
"""Proves that an instance that arrives may serve. Raises MetronomeError if it may not."""


@dataclass(frozen=True)
class _Waiter:
    """A caller that waits for a place."""

    place: asyncio.Future[Place]
    size: int
    """Number of responses that are sent together."""
    avoid: Collection[Instance]
    least: int | None


class Pool:
    """Instances with a limited number of responses in flight. A group goes as a whole to the instance that will
    probably finish it first, once that has a slot for each of its responses."""

    def __init__(
        self,
        config: Config,
        model: Path,
        folder: Path,
        trace: Trace | None = None,
        synced: bool = False,
        notices: RunEvents | None = None,
        how_to_join: str = "",
        needed: Callable[[], bool] = lambda: True,
    ) -> None:
        """`synced`: instances serve only after a weight sync. Without it (evaluation) they serve with the weights that
        they loaded from disk: declared ones at once, others once their check has proved that these are the right ones.
        `notices`: is told which instances join, leave and fail. `how_to_join`: a command that starts an instance which
        joins the run; empty if the pipeline starts them. `needed`: whether the run needs an instance now. While its
        trainer loads it needs none, and the wait for one is not counted."""
        self.config = config
        self.slots = config.slots
        """Largest number of responses in flight on one instance, unless a single group has more."""
        self.processes = InstanceProcesses(config, model, folder)
        self._loading_s = loading_s(model)
        self.start_s = max(config.rollout.timeout_s, self._loading_s)
        """Seconds that the start of an instance may take."""
        self.synced = synced
        self._check: Check | None = None
        self._model = model
        self.weights = ""
        """In an evaluation: the `content_hash` of the model, which instances that join or start again must have."""
        self.failure: MetronomeError | None = None
        """Why the pool gave up, which it does when no instance has lived for longer than `patience`; else None."""
        self._differs = False
        """Whether the last instance that failed had other weights or numerics than the trainer."""
        self.needed = needed
        self.lived = False
        """Whether any instance has ever lived. A declared instance counts once it serves, any other once it has
        answered."""
        self.how_to_join = how_to_join
        self.instances: list[Instance] = []
        """All instances that are not gone."""
        self.arrived: asyncio.Queue[Instance] = asyncio.Queue()
        """New instances, which the health monitor does not watch yet."""
        self.failed_starts: asyncio.Queue[InstanceProcess] = asyncio.Queue()
        """Declared instances that failed to start with the others. The health monitor restarts them."""
        self.connected = asyncio.Event()
        """Set once every declared instance has served or has failed to start."""
        self._trace = trace
        self._notices = notices or RunEvents()
        self._waiting: deque[_Waiter] = deque()
        self._changed = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._ends: dict[str, str] = {}

    # its instances --------------------------------------------------------------------------------

    def spawn(self, count: int) -> None:
        """Start the processes of `count` declared instances; `connect_instances` waits for them."""
        self.processes.spawn(count)

    async def connect_instances(self) -> None:
        """Wait until every declared instance serves or has failed to start. The health monitor restarts the failed
        ones.

        If all of them failed and none that joined lives, or if one refuses its input, the recipe is wrong: raises
        ProcessDied, DeadlineError or BadInput with the name of the first one.
        """
        declared = self.processes.declared
        errors = await asyncio.gather(*(self._first_start(one) for one in declared))
        failed = [(one, error) for one, error in zip(declared, errors, strict=True) if error is not None]
        left = len(declared) - len(failed) + sum(one.declared is None and one.counts for one in self.instances)
        for _, error in failed:
            if isinstance(error, BadInput) or not left:
                raise error
        for one, error in failed:
            self._ends[one.name] = str(error)
            self._say("fails", f"{one.name} could not start, the run goes on with {counted(left, 'other')}: {error}")
            self.failed_starts.put_nowait(one)
        self.connected.set()

    async def _first_start(self, one: InstanceProcess) -> MetronomeError | None:
        """Wait until a declared instance serves, and add it to the pool. A process that was killed is restarted at most
        rollout.restarts times. Return why it failed to start, or None if it serves."""
        rollout = self.config.rollout
        while True:
            try:
                address = await one.serves(self.start_s)
            except MetronomeError as error:
                if not one.child.was_killed or not one.may_restart(rollout.restarts):
                    return error
                self._say("fails", f"{one.name} is being restarted: {error}")
                await self.restart(one)
            else:
                self.enter(one.name, http_url(*address), one)
                return None

    async def restart(self, one: InstanceProcess) -> None:
        """Restart the process of an instance. Raises BadInput if it would load another model than it did."""
        if self.weights:
            await asyncio.to_thread(check_content, self._model, self.weights)
        self.processes.restart(one)

    def enter(self, name: str, url: str, declared: InstanceProcess | None = None, token: str = "") -> Instance:
        """Add an instance that answers under `url`. It serves once it holds the current weights. `token`: the access
        token that it requires; empty: that of the instances that are started here."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(), auto_decompress=False
            )
        client = InstanceClient(
            name=name,
            url=url,
            session=self._session,
            timeout_s=self.config.rollout.timeout_s,
            token=token or self.processes.token,
        )
        instance = Instance(client, declared, self._trace)
        self.lived |= declared is not None
        if declared is None:
            self._say("joins", f"{name} has joined from {url}")
        elif declared.restarts:
            self._say("joins", f"{name} was restarted (restart {declared.restarts})")
        self.instances.append(instance)
        self._ends.pop(name, None)
        if not self.synced and (declared is not None or self._check is None):
            self.admit_instance(instance)
        self.arrived.put_nowait(instance)
        self.changed()
        return instance

    def find_instance(self, name: str) -> Instance | None:
        """Return the instance with this name, or None if there is none or it is gone."""
        return next((instance for instance in self.instances if instance.name == name), None)

    @property
    def size(self) -> int:
        """pool_size: number of instances that take prompts, or that are getting weights and then take prompts again."""
        return sum(instance.state in WORKING for instance in self.instances)

    @property
    def serving(self) -> int:
        """Number of instances that take prompts now."""
        return sum(instance.takes_prompts for instance in self.instances)

    def members(self) -> list[Instance]:
        """Instances that must receive the next version."""
        return [instance for instance in self.instances if instance.gets_version]

    def admit_instance(self, instance: Instance) -> None:
        """Let an instance that holds the current weights take prompts, unless it was excluded or is leaving."""
        if instance.leaving:
            self.remove_instance(instance, "left")
        elif instance.lives:
            if instance.excluded:
                self._say("serves", f"{instance.name} is serving again")
            instance.admit()
            self.changed()

    def check_arrivals(self, check: Check) -> None:
        """Have the health monitor check each instance that arrives, and those that have arrived before."""
        self._check = check
        self.changed()

    async def check_instance(self, instance: Instance) -> None:
        """Check an instance that has arrived. In training, waits until there is a check. Raises MetronomeError."""
        check = await self.wait_for(lambda: self._check or (None if self.synced else _accept))
        await check(instance)
        instance.checked = True
        self.changed()

    def exclude_instance(self, instance: Instance, reason: str) -> None:
        """Send an instance no more prompts until it answers and holds the weights. If it is leaving or dead, it is
        gone."""
        if instance.leaving or instance.dead:
            self.remove_instance(instance, reason)
        elif instance.state not in ("out", "gone"):
            self._say("fails", f"{instance.name} gets no prompts for now: {reason}")
            instance.exclude(reason)
            self.changed()

    def leave_out(self, instance: Instance, error: MetronomeError) -> None:
        """Exclude an instance that has failed in a publish, in its check or in its requests. It is given up when this
        happens FAILURES times without a good response in between. One that the pool itself has excluded meanwhile,
        because it was silent, has not failed; this happens at most SILENCES times."""
        silent = isinstance(error, Abandoned)
        if instance.state == "out" and not silent:
            return
        self._differs = isinstance(error, WeightSyncError)
        if not silent:
            self.exclude_instance(instance, str(error))
        if instance.state != "gone" and instance.record_left_out(silent):
            times = f"silent {SILENCES}" if silent else f"left out {FAILURES}"
            self.remove_instance(instance, f"given up after it was {times} times in a row: {error}")

    def remove_instance(self, instance: Instance, reason: str) -> None:
        """Remove an instance for good. The health monitor may restart a declared instance as a new object."""
        if instance.state != "gone":
            self.lived |= instance.met
            instance.depart(reason)
            how = "has left" if instance.reason == "left" else f"is gone: {instance.reason}"
            self._say("leaves", f"{instance.name} {how}")
            self._ends[instance.name] = instance.reason
            self.instances.remove(instance)
            self.changed()

    def leave(self, instance: Instance) -> None:
        """Give an instance no new groups. It is gone once it holds no group and no update is in progress."""
        instance.drain()
        if instance.may_depart:
            self.remove_instance(instance, "left")

    # the next group -------------------------------------------------------------------------------

    @asynccontextmanager
    async def borrow(
        self, avoid: Collection[Instance] = (), first: bool = False, least: int | None = None, size: int = 0
    ) -> AsyncIterator[Place]:
        """Borrow slots for `size` responses of a group (0: a whole one) on the instance that will probably finish them
        first. Instances in `avoid` are used only if no others serve.

        `first`: go before all who are already waiting, for a group that was begun and interrupted. `least`: only use an
        instance that holds this weight version or a later one.

        Raises ProcessDied if no instance has lived for longer than `patience`.
        """
        size = size or self.config.rollout.group_size
        place = await self._wait_for_place(avoid, first, least, size)
        while not place.instance.takes_prompts:  # excluded, or began an update, before this task continued
            self._give_back(place)
            place = await self._wait_for_place(avoid, True, least, size)
        try:
            yield place
        finally:
            self._give_back(place)

    async def _wait_for_place(self, avoid: Collection[Instance], first: bool, least: int | None, size: int) -> Place:
        """Wait for a place, in the order of asking. The time limits are those of the requests in progress and
        rollout.wait_s (`give_up`)."""
        if self.failure is not None:
            raise self.failure
        asked = _Waiter(asyncio.get_running_loop().create_future(), size, avoid, least)
        (self._waiting.appendleft if first else self._waiting.append)(asked)
        self._hand_out()
        try:
            return await asked.place
        except asyncio.CancelledError:
            place = asked.place
            if place.done() and not place.cancelled() and place.exception() is None:
                self._give_back(place.result())
            else:
                self._hand_out()  # those behind it may need fewer slots
            raise

    def _hand_out(self) -> None:
        """Give places to the waiters in the order of asking, until no place is left."""
        while self._waiting:
            asked = self._waiting[0]
            if not asked.place.done():
                serving = [one for one in self.instances if one.takes_prompts and one.holds(asked.least)]
                if (best := soonest_instance(serving, self.slots, asked.size, asked.avoid)) is None:
                    break
                asked.place.set_result(best.take_place(self.slots, asked.size))
            self._waiting.popleft()

    def free_slot(self, place: Place) -> None:
        """Free the slot of a response that has ended, for the next group."""
        place.instance.free_slot(place)
        self.changed()

    def _give_back(self, place: Place) -> None:
        place.instance.give_back(place)
        if place.instance.may_depart:
            self.remove_instance(place.instance, "left")
        self.changed()

    def changed(self) -> None:
        """Give out places and wake `wait_for`, because the state of an instance has changed."""
        self._changed.set()
        self._hand_out()

    def record_failure(self, place: Place, error: MetronomeError) -> None:
        """Record that a request of a group failed on its instance. Several requests of the group count once. After
        FAILURES in a row the instance is left out; after one reply that breaks the protocol, at once."""
        instance = place.instance
        if instance.state in ("serving", "draining"):  # else the pool itself interrupted the request
            if isinstance(error, BrokenReply):
                self.leave_out(instance, error)
            else:
                text = f"{instance.name} failed a request, which is sent again: {error}"
                self._notices.happened("instances", f"requests to {instance.name}", text, burst=1)
                if not place.failed and instance.record_failure():
                    self.leave_out(instance, MetronomeError(f"{FAILURES} failures in a row: {error}"))
            place.failed = True
        if instance.dead:
            self.remove_instance(instance, "its process ended")

    # the end --------------------------------------------------------------------------------------

    async def wait_for(self, find: Callable[[], Found | None]) -> Found:
        """Wait until `find` returns something, and return it. Raises ProcessDied if no instance has lived for longer
        than `patience`."""
        while (found := find()) is None:
            if self.failure is not None:
                raise self.failure
            self._changed.clear()
            await self._changed.wait()  # ended by the health monitor, which fails the pool
        return found

    async def wait_for_checks(self) -> None:
        """Wait until every instance that has answered has passed its first check or has failed it."""

        def is_open(one: Instance) -> bool:
            return one.met and one.state == "starting" and not (one.checked or one.excluded)

        await self.wait_for(lambda: None if any(map(is_open, self.instances)) else True)

    def give_up(self, error: MetronomeError) -> None:
        """Give up: everyone who waits for an instance gets this error."""
        self.failure = self.failure or error
        while self._waiting:
            place = self._waiting.popleft().place
            if not place.done():
                place.set_exception(self.failure)
        self.changed()

    @property
    def patience(self) -> tuple[float, str]:
        """How many seconds the run waits for a living instance, and the key that sets this."""
        return self.config.rollout.patience(self.lived, self._loading_s)

    def say_waits(self) -> None:
        """Report that there is no instance, how long the run waits for one, and how to start one that joins. Another
        one would not help against weights that differ."""
        limit, key = self.patience
        one = "an instance" if self.lived else "the first instance"
        since = "" if self.needed() else ", counted from when the trainer has loaded its models"
        how = f". Start one with: {self.how_to_join}" if self.how_to_join and not self._differs else ""
        self._say("waits", f"the run waits for {one}, for up to {limit:g} s ({key}){since}{how}")

    def all_gone(self) -> ProcessDied:
        """Return the error that says how the instances ended, or that none has joined."""
        ends = self._ends | {
            one.name: f"is {one.state}: {one.reason}" if one.met or one.reason else "has not answered since it joined"
            for one in self.instances
            if not one.counts
        }
        how = "; ".join(f"{name} {end}" for name, end in ends.items()) or "none has joined"
        limit, key = self.patience
        if self.lived:
            return ProcessDied(f"no rollout instance is left: waited {limit:g} s for one ({key}); {how}")
        command = f"; start one with: {self.how_to_join}" if self.how_to_join else ""
        return ProcessDied(f"no rollout instance has joined: waited {limit:g} s for the first ({key}); {how}{command}")

    def failed_restart(self, name: str, end: str) -> None:
        """Record that a restarted declared instance could not serve."""
        self._ends[name] = end
        self._say("fails", f"{name} could not be restarted: {end}")

    def _say(self, kind: str, text: str) -> None:
        self._notices.happened("instances", kind, text)

    async def close(self) -> None:
        """Stop all instances."""
        for instance in self.instances:
            instance.draw_state()
        if self._session is not None:
            await self._session.close()
        await self.processes.close()


async def _accept(instance: Instance) -> None:
    """Let an instance of an evaluation serve as it is."""
