"""Where the loop's groups come from: the running instances, or a record of them.

A unit's leader asks; what it is told goes to every rank of the unit over the CPU channel, signs of life included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from engine.errors import MetronomeError
from engine.model.tri_model import TriModel
from engine.trainer.publish.publisher import Publisher
from engine.trainer.rank_group import RankGroup
from engine.trainer.replay import Replay
from engine.types import Group, Landed
from engine.wire import messages
from engine.wire.codec import open_group, open_landed
from engine.wire.control_client import ControlClient
from engine.wire.messages import EarlyWork, EndOfStep, Failure, Window

Work = list[Group] | list[Landed]
"""A window to train, or responses to score early."""


class Rollouts(Protocol):
    """What the loop asks of the inference side. Every method is a collective: of all ranks, `work` of a unit's."""

    def publish(self, models: TriModel, version: int) -> float:
        """Give every instance exactly this version of the policy; returns the exposed seconds."""

    def verify(self, models: TriModel, version: int) -> None:
        """After `publish`, beside the first responses:
        the instances compute with the policy's weights, or the sync failed."""

    def settle(self) -> None:
        """Before the policy's weights move: until nothing reads those that were published. No collective."""

    def start(self, step: int) -> None:
        """Start the step's batch of prompts in the background."""

    def work(self, step: int) -> Iterator[Work]:
        """What the unit has to do in the step, each piece as soon as it may be done."""

    def heartbeat(self) -> None:
        """A sign of life amid long work, after which the unit has nothing to ask for.
        Raises what ended the run meanwhile."""

    def failed(self, error: MetronomeError) -> None:
        """Let the launcher, and through it the other units, know that this unit ends."""


class LiveRollouts:
    """Rollouts of the running instances, reached through the launcher."""

    def __init__(self, control: ControlClient, ranks: RankGroup, publisher: Publisher, budget: int) -> None:
        """`budget`: tokens of a window."""
        self._control = control
        self._ranks = ranks
        self._publisher = publisher
        self._budget = budget

    def publish(self, models: TriModel, version: int) -> float:
        """Export, send, and wait until every instance holds the version; first, in the modes that keep batches in
        flight, until weights may move."""
        started = time.perf_counter()
        may_publish = messages.MayPublish(version=version)
        while not self._ranks.from_first(lambda: self._control.ask(may_publish)).now:
            pass  # the launcher's sign of life
        waited = time.perf_counter() - started
        return waited + self._publisher.publish(models, version)

    def verify(self, models: TriModel, version: int) -> None:
        """Publisher.verify."""
        self._publisher.verify(models, version)

    def settle(self) -> None:
        """Publisher.settle."""
        self._publisher.settle()

    def start(self, step: int) -> None:
        """Tell the launcher's producer."""
        self._ranks.from_first(lambda: self._control.ask(messages.StartBatch(step=step)))

    def work(self, step: int) -> Iterator[Work]:
        """Lease from the sample queue until somebody has trained every group.

        A window is acknowledged when its successor is asked for, that is once its gradient is in: one round trip each.
        """
        trained: tuple[int, ...] = ()
        while True:
            reply = self._ranks.from_leader(partial(self._lease, step, trained))
            trained = ()
            if isinstance(reply, EndOfStep):
                return
            if isinstance(reply, (Window, EarlyWork)):  # else the launcher's sign of life: there is nothing to do
                work = _opened(reply)
                yield work
                trained = tuple(item.index for item in work if isinstance(item, Group))

    def _lease(self, step: int, trained: tuple[int, ...]) -> messages.Work:
        lease = messages.Lease(unit=self._ranks.unit, step=step, budget=self._budget, trained=trained)
        return self._control.ask(lease)

    def heartbeat(self) -> None:
        """Told by the unit's leader."""
        _heartbeat(self._control, self._ranks)

    def failed(self, error: MetronomeError) -> None:
        """Told once, by the unit's leader."""
        _report_failure(error, self._control, self._ranks)


class ReplayedRollouts:
    """A record in place of rollouts: nothing to publish, nothing to start."""

    def __init__(self, path: Path, control: ControlClient, ranks: RankGroup, expected: int) -> None:
        """`expected` groups make a step."""
        self._replay = Replay(path, ranks.unit, expected)
        self._control = control
        self._ranks = ranks

    def publish(self, models: TriModel, version: int) -> float:
        """No instances: no time."""
        return 0.0

    def verify(self, models: TriModel, version: int) -> None:
        """Nothing was published."""

    def settle(self) -> None:
        """Nothing was published."""

    def start(self, step: int) -> None:
        """Nothing to start."""

    def work(self, step: int) -> Iterator[Work]:
        """What the unit did in the step, in the order in which it was done; then wait until all units are as far."""
        for entry in self._replay.entries(step):
            self._ranks.from_leader(partial(self._report_progress, step, False))
            yield _opened(Window(entry.groups) if entry.groups else EarlyWork(entry.landed))
        while not isinstance(self._ranks.from_leader(partial(self._report_progress, step, True)), EndOfStep):
            pass  # the launcher's sign of life

    def _report_progress(self, step: int, done: bool) -> EndOfStep | messages.StillWaiting:
        return self._control.ask(messages.ReplayProgress(unit=self._ranks.unit, step=step, done=done))

    def heartbeat(self) -> None:
        """Told by the unit's leader."""
        _heartbeat(self._control, self._ranks)

    def failed(self, error: MetronomeError) -> None:
        """Told once, by the unit's leader."""
        _report_failure(error, self._control, self._ranks)


def _heartbeat(control: ControlClient, ranks: RankGroup) -> None:
    ranks.from_leader(lambda: control.ask(messages.Heartbeat(unit=ranks.unit)))


def _report_failure(error: MetronomeError, control: ControlClient, ranks: RankGroup) -> None:
    if ranks.leader:
        control.ask(messages.TrainerFailed(error=Failure.of(error)))


def _opened(packed: Window | EarlyWork) -> Work:
    if isinstance(packed, Window):
        return [open_group(group) for group in packed.groups]
    return [open_landed(landed) for landed in packed.landed]
