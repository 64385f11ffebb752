"""The rollout instances of a run: who takes prompts, who comes, goes and comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import aiohttp

from engine.config import Config
from engine.errors import MetronomeError, ProcessDied
from engine.launcher.pool.dispatch import Dispatcher, Place
from engine.launcher.pool.instance import Instance
from engine.launcher.pool.instance_client import InstanceClient
from engine.launcher.pool.processes import InstanceProcesses
from engine.run.instance_process import InstanceProcess
from engine.run.trace import Trace
from engine.wire.access_token import access_token, authorization
from engine.wire.address import http_url


class Sync(Protocol):
    """What the pool asks of the weight sync (engine.launcher.weight_sync.sync)."""

    @property
    def version(self) -> int | None:
        """Of the last publish that was finished; None before the first."""

    async def catch_up(self, instance: Instance) -> None:
        """Bring a late instance to `version` and set its `version`. Raises MetronomeError when that failed."""


class Health(Protocol):
    """What the pool asks of its health monitor (engine.launcher.pool.health)."""

    def start(self) -> None:
        """Begin to look after the processes."""

    def watch(self, instance: Instance, declared: InstanceProcess | None) -> None:
        """Look after an instance until it is gone."""

    def handle_departure(self, instance: Instance) -> None:
        """It is gone."""

    def do_not_restart(self, instance: Instance) -> None:
        """Do not start it again."""

    def catching_up(self, instance: Instance) -> bool:
        """Whether it is being brought to the current version on its own."""

    async def close(self) -> None:
        """End its tasks."""


class Pool:
    """Instances with bounded concurrency; a group goes to the one that will probably finish it first."""

    def __init__(
        self,
        config: Config,
        model: Path,
        folder: Path,
        health: Callable[[Pool], Health],
        trace: Trace | None = None,
        synced: bool = False,
    ) -> None:
        """`health`: makes what looks after this pool's instances (engine.launcher.pool.health).

        `synced`: instances serve only after a weight sync; else (evaluation) at once, what they loaded from disk."""
        self.config = config
        self.processes = InstanceProcesses(config, model, folder)
        self.sync: Sync | None = None
        """Brings late instances to the current weights; None until the weight sync is there."""
        self.synced = synced
        self.failure: MetronomeError | None = None
        """Why the pool gave up: no instance lived for rollout.wait_s."""
        self.instances: list[Instance] = []
        """All that are not gone."""
        self._trace = trace
        self._dispatcher = Dispatcher(self.instances, config.rollout.concurrency, self._give_back)
        self._changed = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._health = health(self)
        self._ends: dict[str, str] = {}

    # who is in it ---------------------------------------------------------------------------------

    def spawn(self, count: int) -> None:
        """Start so many declared instances' processes; `connect` waits for them."""
        self.processes.spawn(count)

    async def connect(self) -> None:
        """Wait until every declared instance serves. Raises ProcessDied or DeadlineError with its name."""
        timeout_s = self.config.rollout.timeout_s
        for one, address in zip(self.processes.declared, await _all(self.processes.declared, timeout_s), strict=True):
            self.enter(one.name, http_url(*address), one)
        self._health.start()

    def enter(self, name: str, url: str, declared: InstanceProcess | None = None) -> Instance:
        """Take in an instance that answers under `url`; it serves once it holds the current weights."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            token = authorization(access_token())
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(), headers=token)
        client = InstanceClient(name, url, self._session, self.config.rollout.timeout_s)
        child, restarts = (None, 0) if declared is None else (declared.child, declared.restarts)
        instance = Instance(client, child, self._trace, restarts)
        self.instances.append(instance)
        self._ends.pop(name, None)
        if not self.synced:
            self.admit(instance)
        self._health.watch(instance, declared)
        self.changed()
        return instance

    def find(self, name: str) -> Instance | None:
        """The instance of this name that is not gone."""
        return next((instance for instance in self.instances if instance.name == name), None)

    @property
    def size(self) -> int:
        """pool_size: instances that take prompts, or are being given the weights with which they go on."""
        return sum(instance.works for instance in self.instances)

    @property
    def serving(self) -> int:
        """Instances that take prompts now."""
        return sum(instance.state == "serving" for instance in self.instances)

    def members(self) -> list[Instance]:
        """Those that must get the next version. One that is just catching up is not among them: it does so again."""
        return [
            one
            for one in self.instances
            if one.lives and one.met and not self._health.catching_up(one)
        ]

    def admit(self, instance: Instance) -> None:
        """It holds the current weights: it takes prompts from now on
        (unless it was excluded or asked to leave meanwhile)."""
        if instance.leaving:
            self.gone(instance, "left")
        elif instance.lives:
            instance.state = "serving"
            self.changed()

    def exclude(self, instance: Instance, reason: str) -> None:
        """It takes no more prompts; whoever waits for it goes on without.
        It comes back when it answers and holds the weights."""
        if instance.state == "gone":
            return
        if instance.leaving or (instance.child is not None and not instance.child.alive):
            self.gone(instance, reason)
            return
        instance.state = "silent"
        instance.reason = reason
        instance.busy = None
        instance.version = None  # an update may have been broken off
        instance.client.cut(reason)
        self.changed()

    def gone(self, instance: Instance, reason: str) -> None:
        """It never comes back under this object; a declared one may be started again (Health)."""
        if instance.state == "gone":
            return
        died = instance.child is not None and not instance.child.alive
        instance.reason = instance.child.how_it_ended() if instance.child is not None and died else reason
        instance.state = "gone"
        instance.client.cut(instance.reason)
        self._ends[instance.name] = instance.reason
        self.instances.remove(instance)
        self._health.handle_departure(instance)
        self.changed()

    def leave(self, instance: Instance) -> None:
        """It gets no new groups; once it holds none it is gone."""
        instance.leaving = True
        self._health.do_not_restart(instance)
        if instance.state == "serving":
            instance.state = "draining"
        if (instance.state == "draining" and not instance.groups) or instance.state in ("starting", "silent"):
            self.gone(instance, "left")

    # the next group -------------------------------------------------------------------------------

    @asynccontextmanager
    async def borrow(
        self, avoid: Collection[Instance] = (), first: bool = False, least: int | None = None
    ) -> AsyncIterator[Place]:
        """Room on the instance with the smallest expected finish for one group; on others than `avoid` if any serve.

        `first`: before all who wait already, for a group that was begun and cut. `least`: only on one that holds this
        weight version or a later one.

        Raises ProcessDied when no instance lived for rollout.wait_s.
        """
        if self.failure is not None:
            raise self.failure
        place = await self._dispatcher.ask(avoid, first, least)
        try:
            yield place
        finally:
            self._give_back(place)

    def _give_back(self, place: Place) -> None:
        instance = place.instance
        instance.groups -= 1
        if place.trial:
            instance.breaker.give_back()
        if instance.state == "draining" and not instance.groups:
            self.gone(instance, "left")
        self.changed()

    def changed(self) -> None:
        """Something may be possible now that was not: give out places, wake who waits for a member."""
        self._changed.set()
        self._dispatcher.hand_out()

    def fault(self, instance: Instance) -> None:
        """A request to it failed; enough of them in a row and it is left alone for a while (CircuitBreaker)."""
        if instance.state in ("serving", "draining"):  # else the pool itself broke the request off
            instance.breaker.fault()
        if instance.child is not None and not instance.child.alive:
            self.gone(instance, "its process ended")

    def success(self, instance: Instance) -> None:
        """It answered a request as it should."""
        instance.busy = None
        if instance.breaker.state != "closed":
            instance.breaker.success()
            self.changed()
        instance.breaker.success()

    def busy(self, instance: Instance) -> None:
        """It takes no request although it should serve: when that lasts it is brought to the weights anew."""
        now = time.monotonic()
        instance.busy = now if instance.busy is None else instance.busy
        if instance.state == "serving" and now - instance.busy > self.config.rollout.heartbeat_s:
            self.exclude(instance, f"has refused every request as paused for {now - instance.busy:.1f} s")

    # the end --------------------------------------------------------------------------------------

    async def wait_for_member(self) -> None:
        """Until an instance lives. Raises ProcessDied when none did for rollout.wait_s."""
        while not self.members():
            if self.failure is not None:
                raise self.failure
            self._changed.clear()
            await self._changed.wait()  # the health monitor's look-out for rollout.wait_s ends this

    def fail(self, error: MetronomeError) -> None:
        """Give up: everybody who waits for an instance hears why."""
        self.failure = self.failure or error
        self._dispatcher.fail(self.failure)
        self.changed()

    def all_gone(self) -> ProcessDied:
        """The error that says how the instances ended."""
        ends = self._ends | {one.name: f"is {one.state}: {one.reason}" for one in self.instances if not one.lives}
        how = "; ".join(f"{name} {end}" for name, end in ends.items()) or "none has joined"
        limit = self.config.rollout.wait_s
        return ProcessDied(f"no rollout instance is left: waited {limit:g} s for one (rollout.wait_s); {how}")

    def note(self, name: str, end: str) -> None:
        """How an instance ended that is not in the pool (a restart that failed)."""
        self._ends[name] = end

    async def close(self) -> None:
        """End all instances."""
        await self._health.close()
        for instance in self.instances:
            instance.draw()
        if self._session is not None:
            await self._session.close()
        await self.processes.close()


async def _all(declared: list[InstanceProcess], timeout_s: float) -> list[tuple[str, int]]:
    """The addresses of all; the first that fails ends the wait."""
    try:
        async with asyncio.TaskGroup() as tasks:
            waits = [tasks.create_task(one.serves(timeout_s)) for one in declared]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [wait.result() for wait in waits]
