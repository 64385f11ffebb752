"""The process of a rollout instance, and the address that it writes when it is ready."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import BadInput, DeadlineError
from engine.run.logs import last_message
from engine.run.process import Child

REFILL_S = 3600.0
"""Seconds without a fault after which an instance's count of restarts (rollout.restarts) is reset."""
LOOK_S = 0.05
"""Seconds between two checks for an instance's address."""


@dataclass(eq=False)
class InstanceProcess:
    """One instance of the recipe, including all its restarts."""

    number: int
    child: Child
    port_file: Path
    restarts: int = 0
    """Total number of restarts."""
    faults: int = 0
    """Restarts that count against rollout.restarts: those since it last ran for `REFILL_S`."""
    began: float = field(default_factory=time.monotonic)
    """Monotonic time of the last start."""

    @property
    def name(self) -> str:
        """instance-0 …"""
        return self.child.name

    def may_restart(self, most: int) -> bool:
        """Whether it may be restarted. If it had run for `REFILL_S`, the count of faults starts again at 0."""
        if time.monotonic() - self.began > REFILL_S:
            self.faults = 0
        return self.faults < most

    def address(self) -> tuple[str, int] | None:
        """Host and port on which it serves; None before it is ready."""
        if not self.port_file.exists():
            return None
        address = json.loads(self.port_file.read_text())
        return address["host"], address["port"]

    async def serves(self, timeout_s: float) -> tuple[str, int]:
        """Wait for its address and return it. Raises BadInput if the instance refuses its input, else ProcessDied or
        DeadlineError, with its name."""
        deadline = time.monotonic() + timeout_s
        while (address := self.address()) is None:
            if self.child.refused_input:
                raise BadInput(self._refusal())
            self.child.check_alive()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self.name} was not ready after {timeout_s:g} s (rollout.timeout_s; a slow or busy machine "
                    f"needs more) and {self.child.how_it_ended()}"
                )
            await asyncio.sleep(LOOK_S)
        return address

    def _refusal(self) -> str:
        """The line of its log that says why it refuses its input."""
        log = self.child.log
        said = last_message(log, f"{self.name}: ") if log is not None else ""
        return f"{said} (its log: {log})" if said else f"{self.name} {self.child.how_it_ended()}"
