"""The rollout instances of a run: started, given work group by group, kept on one weight version, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from engine.config import Config
from engine.errors import DeadlineError, ProcessDied
from engine.process import Child, python, stop_all
from engine.rollout.client import InstanceClient, InstanceGone


@dataclass
class Instance:
    """One instance of the pool."""

    client: InstanceClient
    child: Child
    groups: int = 0
    """Groups in flight on it."""
    gone: bool = field(default=False)

    @property
    def usable(self) -> bool:
        """Whether it can take a prompt."""
        return not self.gone and self.child.alive


class Pool:
    """Instances with bounded concurrency; a group goes to the least loaded one."""

    def __init__(self, config: Config, model: Path, folder: Path) -> None:
        self._config = config
        self._model = model
        self._folder = folder
        self._instances: list[Instance] = []
        self._free = asyncio.Condition()
        self._session: aiohttp.ClientSession | None = None
        self._children: list[Child] = []

    def spawn(self) -> None:
        """Start the instances' processes; `connect` waits for them."""
        for number in range(self._config.rollout.instances):
            port_file = self._port_file(number)
            port_file.unlink(missing_ok=True)
            name = f"instance-{number}"
            log = self._folder / "logs" / f"{name}.log"
            self._children.append(Child(name, self._command(number, port_file), log))

    def _port_file(self, number: int) -> Path:
        return self._folder / "logs" / f"instance-{number}.address"

    def _command(self, number: int, port_file: Path) -> list[str]:
        rollout = self._config.rollout
        share = len(rollout.devices) // rollout.instances
        cores = rollout.devices[number * share : (number + 1) * share]
        arguments = {
            "--model": str(self._model),
            "--name": f"instance-{number}",
            "--port-file": str(port_file),
            "--slots": str(rollout.concurrency * rollout.group_size),
            "--max-context": str(rollout.max_context),
            "--threads": str(self._config.instance_threads),
        }
        if cores:
            arguments["--cores"] = ",".join(map(str, cores))
        flags = ["--deterministic"] if rollout.deterministic else []
        return python("engine.rollout.server", *(part for pair in arguments.items() for part in pair), *flags)

    async def connect(self) -> None:
        """Wait until every instance serves. Raises ProcessDied or DeadlineError with its name."""
        timeout_s = self._config.rollout.timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        deadline = time.monotonic() + timeout_s
        for number, child in enumerate(self._children):
            while not self._port_file(number).exists():
                child.check()
                if time.monotonic() > deadline:
                    raise DeadlineError(f"{child.name} does not serve after {timeout_s:.0f} s; its log: {child.log}")
                await asyncio.sleep(0.05)
            address = json.loads(self._port_file(number).read_text())
            url = f"http://{address['host']}:{address['port']}"
            self._instances.append(Instance(InstanceClient(child.name, url, self._session, timeout_s), child))

    @property
    def size(self) -> int:
        """Usable instances."""
        return sum(instance.usable for instance in self._instances)

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[Instance]:
        """The least loaded instance for one group, when one has room. Raises ProcessDied when none lives."""
        async with self._free:
            while (instance := self._pick()) is None:
                await self._free.wait()
            instance.groups += 1
        try:
            yield instance
        finally:
            async with self._free:
                instance.groups -= 1
                self._free.notify()

    def _pick(self) -> Instance | None:
        usable = [instance for instance in self._instances if instance.usable]
        if not usable:
            raise self.all_gone()
        best = min(usable, key=lambda instance: instance.groups)
        return best if best.groups < self._config.rollout.concurrency else None

    def all_gone(self) -> ProcessDied:
        """The error that says how the instances ended (a connection may break a moment before its process is gone)."""
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(1.0)
        ends = "; ".join(f"{child.name} {child.how_it_ended()}" for child in self._children)
        return ProcessDied(f"no rollout instance is left: {ends}")

    async def drop(self, instance: Instance) -> None:
        """Exclude an instance that is gone; what it held is sent to the others."""
        instance.gone = True
        async with self._free:
            self._free.notify_all()

    async def publish(self, version: int, info: dict[str, Any]) -> None:
        """Bring every usable instance to exactly this version; one that is gone is excluded."""
        await asyncio.gather(*(self._update(instance, version, info) for instance in self._instances if instance.usable))
        if self.size == 0:
            raise self.all_gone()

    async def _update(self, instance: Instance, version: int, info: dict[str, Any]) -> None:
        try:
            await instance.client.update_weights(version, info)
        except InstanceGone:
            await self.drop(instance)

    async def close(self) -> None:
        """End all instances."""
        if self._session is not None:
            await self._session.close()
        await asyncio.to_thread(stop_all, self._children)
