"""One rollout instance as the pool sees it: its state, its load, its breaker."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.launcher.pool.circuit_breaker import CircuitBreaker
from engine.launcher.pool.instance_client import InstanceClient
from engine.run.process import Child
from engine.run.trace import Trace

State = Literal["starting", "updating", "serving", "draining", "silent", "gone"]
"""starting: answers, has no weights of the run yet · updating: is given weights · serving: takes prompts · draining:
finishes what it holds, then is gone · silent: excluded, may come back · gone: never comes back under this object."""

WORKING: tuple[State, ...] = ("serving", "updating")
"""States that count in pool_size: it takes prompts, or is being given the weights with which it goes on."""

SMOOTHING = 0.3
"""Weight of the newest figure in an instance's averages."""


@dataclass(eq=False)
class Instance:
    """One instance of the pool."""

    client: InstanceClient
    child: Child | None = None
    """Its process, when this run started it; None: it joined from outside."""
    trace: Trace | None = None
    restarts: int = 0
    """How often its process was started again."""
    groups: int = 0
    """Groups in flight on it."""
    version: int | None = None
    """Weight version that it was brought to; None before the first."""
    leaving: bool = False
    """It asked to leave: it takes no more prompts and no further version."""
    reason: str = ""
    """Why it was last excluded."""
    group_s: float | None = None
    """Seconds per group at its pace (groups that run side by side share them), smoothed; None before the first."""
    met: bool = False
    """Whether it has ever answered: a wrong address holds up no weight update."""
    last_heard: float = field(default_factory=time.monotonic)
    """When it last answered (monotonic)."""
    figures: dict[str, float] = field(default_factory=dict)
    """Of its last answer to GET /load."""
    tokens_per_s: float = 0.0
    """Generated between its last two answers."""
    attempts: int = 0
    """Times in a row that it could not be brought to the weights."""
    retry: float = 0.0
    """When the next attempt is due (monotonic)."""
    busy: float | None = None
    """Since when it has refused every request as one that is paused (monotonic)."""
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    _state: State = "starting"
    _loaded: float = field(default_factory=time.monotonic)
    _since: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        """Unique among the pool's instances."""
        return self.client.name

    @property
    def state(self) -> State:
        """Where it is in its life; setting it draws the period that ends on the timeline."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        if state != self._state:
            self.draw()
            self._state = state

    def draw(self) -> None:
        """Put the current state's period so far on the timeline."""
        now = time.time()
        if self.trace is not None:
            self.trace.add(self._state, self._since, now, lane=f"pool {self.name}")
        self._since = now

    @property
    def works(self) -> bool:
        """Whether it counts in pool_size."""
        return self._state in WORKING

    @property
    def lives(self) -> bool:
        """Whether it takes prompts, or will without anybody's doing."""
        return self._state in ("starting", "updating", "serving")

    def finished(self, seconds: float, beside: int) -> None:
        """A group took so long beside so many (itself included)."""
        pace = seconds / max(1, beside)
        self.group_s = pace if self.group_s is None else (1 - SMOOTHING) * self.group_s + SMOOTHING * pace

    def loaded(self, figures: dict[str, Any]) -> None:
        """Take in an answer to GET /load."""
        now = time.monotonic()
        before = self.figures.get("generated_tokens")
        after = figures.get("generated_tokens")
        if before is not None and after is not None and now > self._loaded:
            self.tokens_per_s = max(0.0, after - before) / (now - self._loaded)
        self.figures = {key: value for key, value in figures.items() if isinstance(value, (int, float))}
        self._loaded = now

    def status(self) -> dict[str, Any]:
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
            "running": self.figures.get("running"),
            "waiting": self.figures.get("waiting"),
            "tokens_per_s": self.tokens_per_s,
        }
