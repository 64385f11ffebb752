"""Keeps the pool alive: hears hearts, starts dead instances again, brings late ones to the weights,
knows when to give up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from engine.errors import MetronomeError
from engine.launcher.pool.instance import Instance
from engine.launcher.pool.instance_client import InstanceFault, Refused
from engine.launcher.pool.pool import Pool
from engine.run.instance_process import InstanceProcess
from engine.wire.address import http_url

LOOK_S = 0.1
"""How often processes are looked at."""
BACKOFF_S = 0.5
"""Pause before the first restart of a process, and before the second attempt to bring an instance to the weights;
it doubles."""
ATTEMPTS = 3
"""An instance that could not be brought to the weights so often in a row is given up."""


class HealthMonitor:
    """The pool's background tasks."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tasks: set[asyncio.Task[None]] = set()
        self._declared: dict[Instance, InstanceProcess] = {}
        self._catching_up: set[Instance] = set()
        self._last_alive = time.monotonic()

    def start(self) -> None:
        """Begin to look after the processes; the time without any instance counts from now."""
        self._last_alive = time.monotonic()
        self._run(self._watch_processes())

    def watch(self, instance: Instance, declared: InstanceProcess | None) -> None:
        """Look after an instance until it is gone."""
        if declared is not None:
            self._declared[instance] = declared
        self._run(self._watch_instance(instance))

    def handle_departure(self, instance: Instance) -> None:
        """It is gone; a declared one is ended for good, or started again."""
        if (declared := self._declared.pop(instance, None)) is not None:
            self._run(self._restart(declared))

    def do_not_restart(self, instance: Instance) -> None:
        """Do not start it again."""
        if (declared := self._declared.get(instance)) is not None:
            declared.wanted = False

    def catching_up(self, instance: Instance) -> bool:
        """Whether it is being brought to the current version on its own."""
        return instance in self._catching_up

    async def close(self) -> None:
        """End the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """An error in a background task ends the run: nobody would look after the instances any more."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._pool.fail(
                error if isinstance(error, MetronomeError) else MetronomeError(f"the pool failed: {error!r}")
            )
            if not isinstance(error, MetronomeError):
                raise error

    # processes ------------------------------------------------------------------------------------

    async def _watch_processes(self) -> None:
        """Notice deaths at once; fail the pool when nothing lived for rollout.wait_s."""
        limit = self._pool.config.rollout.wait_s
        while True:
            for instance in list(self._pool.instances):
                if instance.child is not None and not instance.child.alive:
                    self._pool.gone(instance, "its process ended")
            now = time.monotonic()
            if any(instance.lives for instance in self._pool.instances):
                self._last_alive = now
            elif now - self._last_alive > limit:
                self._pool.fail(self._pool.all_gone())
            await asyncio.sleep(LOOK_S)

    async def _restart(self, declared: InstanceProcess) -> None:
        """Start a declared instance again, at most rollout.restarts times."""
        rollout = self._pool.config.rollout
        await asyncio.to_thread(declared.child.stop, 0.0)
        while declared.wanted and declared.restarts < rollout.restarts:
            await asyncio.sleep(BACKOFF_S * 2**declared.restarts)
            self._pool.processes.restart(declared)
            try:
                address = await declared.serves(rollout.timeout_s)
            except MetronomeError as error:
                self._pool.note(declared.name, str(error))
                await asyncio.to_thread(declared.child.stop, 0.0)
            else:
                self._pool.enter(declared.name, http_url(*address), declared)
                return

    # hearts ---------------------------------------------------------------------------------------

    async def _watch_instance(self, instance: Instance) -> None:
        """Until it is gone: beat by beat, exclude it when it is silent, bring it back when it answers."""
        rollout = self._pool.config.rollout
        patience = max(rollout.heartbeat_s, rollout.wait_s / 2)  # early enough to replace it before the run gives up
        interval = rollout.heartbeat_s / 3
        while instance.state != "gone":
            answered = await self._check_heartbeat(instance, interval)
            silence = time.monotonic() - instance.last_heard
            if answered and self._needs_catch_up(instance):
                self._catching_up.add(instance)
                self._run(self._catch_up(instance))
            elif silence > patience:
                self._pool.gone(instance, f"did not answer for {silence:.1f} s")
            elif silence > rollout.heartbeat_s and instance.state != "silent":
                self._pool.exclude(instance, f"no answer for {silence:.1f} s (rollout.heartbeat_s)")
            await asyncio.sleep(interval)

    async def _check_heartbeat(self, instance: Instance, timeout_s: float) -> bool:
        """Whether it answered; any answer is a sign of life, also while an update keeps it from telling its load."""
        was = instance.state, instance.version
        calls = (instance.client.call("GET", route, timeout_s=timeout_s) for route in ("/load", "/health"))
        load, health = await asyncio.gather(*calls, return_exceptions=True)
        for result in (load, health):
            if isinstance(result, BaseException) and not isinstance(result, MetronomeError):
                raise result
        if isinstance(load, dict):
            instance.loaded(load)
            if was == (instance.state, instance.version):
                self._compare(instance, load.get("weight_version"))
        answered = any(isinstance(result, (dict, InstanceFault, Refused)) for result in (load, health))
        if answered:
            instance.last_heard = time.monotonic()
            if not instance.met:
                instance.met = True
                self._pool.changed()
        return answered

    def _compare(self, instance: Instance, holds: object) -> None:
        """Whoever starts an instance again behind the same address gives it other weights than we know of."""
        if instance.state == "serving" and None not in (instance.version, holds) and holds != instance.version:
            self._pool.exclude(
                instance, f"holds weight version {holds}, it was brought to {instance.version}: started again?"
            )

    def _needs_catch_up(self, instance: Instance) -> bool:
        """Whether it must be brought to the weights on its own, now;
        before the first publish it waits for that instead."""
        if instance.leaving or instance.state not in ("starting", "silent") or instance in self._catching_up:
            return False
        sync = self._pool.sync
        if not self._pool.synced or (sync is not None and sync.version is not None):
            return time.monotonic() >= instance.retry
        instance.state = "starting"
        return False

    async def _catch_up(self, instance: Instance) -> None:
        """Bring it to the current version, again when that moved on meanwhile; then it serves.
        Give it up after ATTEMPTS."""
        sync = self._pool.sync
        instance.state = "updating"
        instance.version = None
        try:
            while sync is not None and instance.lives and instance.version != sync.version:
                version = sync.version
                await sync.catch_up(instance)
                instance.version = version if instance.version is None else instance.version
        except MetronomeError as error:
            self._failed(instance, str(error))
        else:
            instance.attempts = 0
        finally:
            self._catching_up.discard(instance)
        self._pool.admit(instance)

    def _failed(self, instance: Instance, reason: str) -> None:
        instance.attempts += 1
        instance.retry = time.monotonic() + BACKOFF_S * 2**instance.attempts
        self._pool.exclude(instance, reason)
        if instance.attempts == ATTEMPTS:
            self._pool.gone(instance, f"given up after {ATTEMPTS} attempts to bring it to the weights: {reason}")
