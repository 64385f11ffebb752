"""The instances that a run starts itself: their processes, their addresses, their restarts."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

from engine.config import Config
from engine.errors import DeadlineError
from engine.process import Child, python, stop_all

LOOK_S = 0.05
"""How often an instance's address is looked for."""


@dataclass(eq=False)
class Declared:
    """One instance of the recipe, through all its restarts."""

    number: int
    child: Child
    port_file: Path
    restarts: int = 0
    wanted: bool = True
    """False once it was asked to leave: it is not started again."""

    @property
    def name(self) -> str:
        """instance-0 …"""
        return self.child.name

    def url(self) -> str | None:
        """Where it serves; None before it does."""
        if not self.port_file.exists():
            return None
        address = json.loads(self.port_file.read_text())
        return f"http://{bracketed(address['host'])}:{address['port']}"

    async def serves(self, timeout_s: float) -> str:
        """Wait for its URL. Raises ProcessDied or DeadlineError with its name."""
        deadline = time.monotonic() + timeout_s
        while (url := self.url()) is None:
            self.child.check()
            if time.monotonic() > deadline:
                raise DeadlineError(f"{self.name} does not serve after {timeout_s:g} s (rollout.timeout_s; a slow or busy "
                                    f"machine needs more) and {self.child.how_it_ended()}")
            await asyncio.sleep(LOOK_S)
        return url


class Fleet:
    """Starts the declared instances' processes, again when they died, and ends them."""

    def __init__(self, config: Config, model: Path, folder: Path) -> None:
        """`model`: a Hugging Face folder; logs and addresses are written to `folder`/logs."""
        self._config = config
        self._model = model
        self._logs = folder / "logs"
        self.declared: list[Declared] = []

    def spawn(self, count: int) -> None:
        """Start so many instances; returns at once."""
        for number in range(count):
            port_file = self._logs / f"instance-{number}.address"
            self.declared.append(Declared(number, self._child(number, port_file), port_file))

    def restart(self, one: Declared) -> None:
        """Start its process again."""
        one.restarts += 1
        one.child = self._child(one.number, one.port_file)

    def _child(self, number: int, port_file: Path) -> Child:
        port_file.unlink(missing_ok=True)
        name = f"instance-{number}"
        command, env = instance_command(self._config, self._model, name, number, port_file)
        return Child(name, command, self._logs / f"{name}.log", env)

    async def close(self) -> None:
        """End all of them."""
        await asyncio.to_thread(stop_all, [one.child for one in self.declared])


def bracketed(host: str) -> str:
    """The host as a URL has it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def instance_command(
    config: Config, model: Path, name: str, number: int, port_file: Path, port: int = 0, host: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Command line and additional environment of the process of one instance; it writes its address to `port_file`.

    `number` picks its share of rollout.devices; port 0 takes a free one, an empty host the loopback address.
    """
    start = _vllm if config.rollout.engine == "vllm" else _embedded
    command, env = start(config, model, name, number, port_file)
    command += ["--port", str(port)] if port else []
    command += ["--host", host] if host else []
    return command, env


def _vllm(config: Config, model: Path, name: str, number: int, port_file: Path) -> tuple[list[str], dict[str, str]]:
    from engine.rollout.vllm.command import command

    return command(config, model, name, number, port_file)


def _embedded(config: Config, model: Path, name: str, number: int, port_file: Path) -> tuple[list[str], dict[str, str]]:
    rollout = config.rollout
    cores = config.instance_cores(number)
    arguments = {
        "--model": str(model),
        "--name": name,
        "--port-file": str(port_file),
        "--slots": str(rollout.concurrency * rollout.group_size),
        "--max-context": str(rollout.max_context),
        "--threads": str(config.instance_threads),
    }
    if cores:
        arguments["--cores"] = ",".join(map(str, cores))
    flags = ["--deterministic"] if rollout.deterministic else []
    return python("engine.rollout.server", *(part for pair in arguments.items() for part in pair), *flags), {}
