"""The instances that a run starts itself: their processes, their addresses, their restarts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from engine.config import Config
from engine.run.commands import instance_command
from engine.run.instance_process import InstanceProcess
from engine.run.process import Child, stop_all


class InstanceProcesses:
    """Starts the declared instances' processes, again when they died, and ends them."""

    def __init__(self, config: Config, model: Path, folder: Path) -> None:
        """`model`: a Hugging Face folder; logs and addresses are written to `folder`/logs, their
        profiles (train.profile) to `folder`/profile."""
        self._config = config
        self._model = model
        self._logs = folder / "logs"
        self._profiles = (folder / "profile").resolve() if config.train.profile else None
        self.declared: list[InstanceProcess] = []

    def spawn(self, count: int) -> None:
        """Start so many instances; returns at once."""
        for number in range(count):
            port_file = self._logs / f"instance-{number}.address"
            self.declared.append(InstanceProcess(number, self._child(number, port_file), port_file))

    def restart(self, one: InstanceProcess) -> None:
        """Start its process again."""
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
        return Child(name, command, self._logs / f"{name}.log", env)

    async def close(self) -> None:
        """End all of them."""
        await asyncio.to_thread(stop_all, [one.child for one in self.declared])
