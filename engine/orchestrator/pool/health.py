"""Keeps the pool alive: checks that every instance answers, restarts dead ones, and brings late ones to the weights.
Fails the pool if there has been no instance for too long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Self

from engine.errors import BadInput, MetronomeError
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.pool.instance_client import InstanceFault, Refused
from engine.orchestrator.pool.pool import Pool
from engine.run.instance_process import InstanceProcess
from engine.wire.address import http_url
from engine.wire.rollout_messages import ROLLOUT_PROTOCOL, GetHealth, GetLoad, Health, Load

LOOK_S = 0.1
"""Seconds between two checks of the processes."""
BACKOFF_S = 0.5
"""Seconds before the first restart of a process. Each further one doubles it."""


class HealthMonitor:
    """Watches a pool while its `async with` block runs, and tells the pool which instances to admit and exclude."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tasks: set[asyncio.Task[None]] = set()
        self._checking: set[Instance] = set()

    async def __aenter__(self) -> Self:
        self._run(self._watch_arrivals())
        self._run(self._watch_failed_starts())
        self._run(self._watch_processes())
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the run on an error in a background task, because instances are no longer watched."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._pool.give_up(
                error if isinstance(error, MetronomeError) else MetronomeError(f"the pool failed: {error!r}")
            )
            if not isinstance(error, MetronomeError):
                raise error

    # processes ------------------------------------------------------------------------------------

    async def _watch_processes(self) -> None:
        """Notice deaths at once. Fail the pool if it needs an instance and none has lived for longer than its
        `patience`. An address that never answers does not count as living, however often it joins."""
        pool = self._pool
        await pool.connected.wait()
        waits_since = time.monotonic()
        told = None
        while True:
            for instance in list(pool.instances):
                if instance.dead:
                    pool.remove_instance(instance, "its process ended")
            now = time.monotonic()
            lives = any(instance.counts for instance in pool.instances)
            pool.lived |= lives
            if lives or not pool.needed():
                waits_since = now
            elif now - waits_since > pool.patience[0]:
                pool.give_up(pool.all_gone())
            is_arriving = any(not instance.met for instance in pool.instances)  # it was not asked yet whether it lives
            state = None if lives or is_arriving else pool.needed()
            if state != told and state is not None and pool.failure is None:
                pool.say_waits()
            told = state
            await asyncio.sleep(LOOK_S)

    async def _restart(self, declared: InstanceProcess, wanted: bool) -> None:
        """Stop a declared instance's process. If it is `wanted`, restart it, at most rollout.restarts times in a
        row."""
        rollout = self._pool.config.rollout
        await asyncio.to_thread(declared.child.stop, 0.0)
        while wanted and declared.may_restart(rollout.restarts):
            await asyncio.sleep(BACKOFF_S * 2**declared.faults)
            await self._pool.restart(declared)
            try:
                address = await declared.serves(self._pool.start_s)
            except MetronomeError as error:
                self._pool.failed_restart(declared.name, str(error))
                await asyncio.to_thread(declared.child.stop, 0.0)
                if isinstance(error, BadInput):  # it would refuse the input again
                    return
            else:
                self._pool.enter(declared.name, http_url(*address), declared)
                return

    async def _watch_failed_starts(self) -> None:
        """Restart declared instances that could not start with the others."""
        while True:
            self._run(self._restart(await self._pool.failed_starts.get(), wanted=True))

    # instances ------------------------------------------------------------------------------------

    async def _watch_arrivals(self) -> None:
        """Watch every instance that enters the pool."""
        while True:
            self._run(self._watch_instance(await self._pool.arrived.get()))

    async def _watch_instance(self, instance: Instance) -> None:
        """Exclude an instance when it is silent and bring it back when it answers, until it is gone. Then restart it if
        it is declared, unless it asked to leave."""
        rollout = self._pool.config.rollout
        patience = max(rollout.heartbeat_s, rollout.wait_s / 2)  # early enough to replace it before the run gives up
        interval = rollout.heartbeat_s / 3
        while instance.state != "gone":
            answered = await self._check_heartbeat(instance, interval)
            silence = instance.silence_s
            if answered:
                self._bring_back(instance)
            elif silence > patience:
                self._pool.remove_instance(instance, f"did not answer for {silence:.1f} s")
            elif silence > rollout.heartbeat_s and instance.state != "out":
                self._pool.exclude_instance(instance, f"no answer for {silence:.1f} s (rollout.heartbeat_s)")
            await instance.wait_until_gone(interval)
        if instance.declared is not None:
            await self._restart(instance.declared, wanted=not instance.leaving)

    async def _check_heartbeat(self, instance: Instance, timeout_s: float) -> bool:
        """Return whether the instance answered. Any answer is a sign of life, because an instance can't report its load
        during an update."""
        was = instance.state, instance.version
        asked_load = instance.client.call(GetLoad(), timeout_s=timeout_s)
        asked_health = instance.client.call(GetHealth(), timeout_s=timeout_s)
        load, health = await asyncio.gather(asked_load, asked_health, return_exceptions=True)
        for result in (load, health):
            if isinstance(result, BaseException) and not isinstance(result, MetronomeError):
                raise result
        if isinstance(health, Health) and health.protocol != ROLLOUT_PROTOCOL:
            self._pool.remove_instance(
                instance, f"speaks {_spoken(health)} of the rollout protocol, not {ROLLOUT_PROTOCOL}"
            )
        if isinstance(load, Load):
            instance.record_load(load)
            if was == (instance.state, instance.version):
                self._compare(instance, load.weight_version)
        answered = any(isinstance(result, (Load, Health, InstanceFault, Refused)) for result in (load, health))
        if answered and instance.record_answer():
            self._pool.changed()
        return answered

    def _compare(self, instance: Instance, holds: int) -> None:
        """Exclude an instance that was restarted behind the same address: it no longer holds the weights it was brought
        to."""
        if instance.takes_prompts and instance.version is not None and holds != instance.version:
            self._pool.exclude_instance(
                instance, f"holds weight version {holds}, but was given {instance.version}: was it restarted?"
            )

    def _bring_back(self, instance: Instance) -> None:
        """Let an instance that answers wait for the run's weights, once it has passed its check. Without a weight sync
        it then serves."""
        pool = self._pool
        if instance.state == "out":
            instance.wait_for_weights()
            pool.changed()
        if instance.state == "starting" and instance not in self._checking and not (pool.synced and instance.checked):
            self._checking.add(instance)
            self._run(self._check(instance))

    async def _check(self, instance: Instance) -> None:
        """Check an instance (`Pool.check_arrivals`)."""
        pool = self._pool
        try:
            async with instance.client.until_ended("the check of an instance that arrives"):
                await pool.check_instance(instance)
        except MetronomeError as error:
            pool.leave_out(instance, error)
        else:
            if not pool.synced:
                pool.admit_instance(instance)
        finally:
            self._checking.discard(instance)


def _spoken(health: Health) -> str:
    return "an unnamed version" if health.protocol is None else f"version {health.protocol}"
