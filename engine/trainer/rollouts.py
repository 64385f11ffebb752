"""The source of the loop's groups: the running instances, or a record of an earlier run.

A unit's leader asks the launcher. Every reply, signs of life included, goes to all ranks of the unit over the CPU
channel.
"""

from __future__ import annotations

import sys
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
from engine.trainer.stored_bodies import StoredBodies
from engine.types import Group, Landed
from engine.wire import messages
from engine.wire.codec import open_landed
from engine.wire.control_client import ControlClient
from engine.wire.messages import EarlyWork, EndOfStep, Failure, Window
from engine.wire.sealed import open_group
from engine.wire.store_client import StoreFault

Work = list[Group] | list[Landed]
"""A window to train, or responses to score early."""


class Rollouts(Protocol):
    """The inference side, as the loop uses it.

    `work` and `heartbeat` are collectives of a unit's ranks; `settle` and `failed` are no collectives; the others are
    collectives of all ranks.
    """

    def publish(self, models: TriModel, version: int) -> float:
        """Give every instance exactly this version of the policy. Return the seconds that it blocked the trainer."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of the weights that this rank sent in the last publish."""

    def verify(self, models: TriModel, version: int) -> None:
        """Check, after `publish`, that the instances compute with the policy's weights.

        They sample meanwhile. Where they take weights over in the background, this does not wait for the check.
        """

    def settle(self) -> None:
        """Wait until nothing reads the published weights any more, before the policy changes them. No collective."""

    def start(self, step: int) -> None:
        """Start the step's batch of prompts in the background."""

    def work(self, step: int) -> Iterator[Work]:
        """Yield the unit's work of the step, each piece as soon as it can be done. A collective of the unit."""

    def heartbeat(self) -> None:
        """Send a sign of life during long work that asks for nothing. A collective of the unit.

        Raises the error that has ended the run meanwhile.
        """

    def failed(self, error: MetronomeError) -> None:
        """Tell the launcher, and through it the other units, that this unit ends with an error."""


class LiveRollouts:
    """The running instances, reached through the launcher."""

    def __init__(
        self,
        control: ControlClient,
        ranks: RankGroup,
        publisher: Publisher,
        budget: int,
        bodies: StoredBodies | None = None,
    ) -> None:
        """`budget`: tokens of a window; `bodies`: fetches the bodies of groups that lie outside the launcher."""
        self._bodies = bodies
        self._control = control
        self._ranks = ranks
        self._publisher = publisher
        self._budget = budget

    def publish(self, models: TriModel, version: int) -> float:
        """Wait until weights may move, then give every instance the version. Return the seconds of both."""
        started = time.perf_counter()
        may_publish = messages.MayPublish(version=version)
        while not self._ranks.from_first(lambda: self._control.ask(may_publish)).now:
            pass  # the launcher's sign of life
        waited = time.perf_counter() - started
        return waited + self._publisher.publish(models, version)

    @property
    def sent_bytes(self) -> int:
        """See `Publisher.sent_bytes`."""
        return self._publisher.sent_bytes

    def verify(self, models: TriModel, version: int) -> None:
        """See `Publisher.verify`."""
        self._publisher.verify(models, version)

    def settle(self) -> None:
        """See `Publisher.settle`."""
        self._publisher.settle()

    def start(self, step: int) -> None:
        """Ask the launcher to start the batch."""
        self._ranks.from_first(lambda: self._control.ask(messages.StartBatch(step=step)))

    def work(self, step: int) -> Iterator[Work]:
        """Lease windows from the sample queue until the units have trained all groups of the step.

        The request for the next window acknowledges the last one, whose gradient is in: one round trip a window.
        """
        trained: tuple[int, ...] = ()
        while True:
            reply = self._ranks.from_leader(partial(self._lease, step, trained))
            trained = ()
            if isinstance(reply, EndOfStep):
                return
            if isinstance(reply, (Window, EarlyWork)):  # else a sign of life: ask again
                yield _opened(reply)
                trained = (reply.lease,) if isinstance(reply, Window) else ()

    def _lease(self, step: int, trained: tuple[int, ...]) -> messages.Work:
        """Return what the unit does next. A sign of life while the bodies of a window are being fetched."""
        bodies = self._bodies
        ask = partial(messages.Lease, unit=self._ranks.unit, step=step, budget=self._budget, trained=trained)
        if bodies is None:
            return self._control.ask(ask())
        if bodies.lease is None:
            reply = self._control.ask(ask(fetches=True))
            if not isinstance(reply, Window) or reply.store is None:
                return reply
            bodies.begin(reply)
        lease = bodies.lease
        try:
            if (whole := bodies.wait_briefly()) is not None:
                return whole
        except StoreFault as fault:
            print(f"unit {self._ranks.unit} leaves lease {lease} to the launcher: {fault}", file=sys.stderr, flush=True)
            return self._control.ask(ask(trained=(), fetches=True, unfetched=lease))  # `trained` was said
        self._control.ask(messages.Heartbeat(unit=self._ranks.unit))
        return messages.StillWaiting()

    def heartbeat(self) -> None:
        """Sent by the unit's leader."""
        _send_heartbeat(self._control, self._ranks)

    def failed(self, error: MetronomeError) -> None:
        """Sent by the unit's leader."""
        _report_failure(error, self._control, self._ranks)


class ReplayedRollouts:
    """A record in place of instances: nothing is published or started."""

    def __init__(self, path: Path, control: ControlClient, ranks: RankGroup, expected: int) -> None:
        """`expected` groups make a step."""
        self._replay = Replay(path, ranks.unit, expected)
        self._control = control
        self._ranks = ranks

    def publish(self, models: TriModel, version: int) -> float:
        """There are no instances. Return 0."""
        return 0.0

    @property
    def sent_bytes(self) -> int:
        """Nothing was published."""
        return 0

    def verify(self, models: TriModel, version: int) -> None:
        """Nothing was published."""

    def settle(self) -> None:
        """Nothing was published."""

    def start(self, step: int) -> None:
        """Nothing to start."""

    def work(self, step: int) -> Iterator[Work]:
        """Yield the unit's recorded work of the step in the recorded order, then wait until all units are done."""
        for entry in self._replay.entries(step):
            self._ranks.from_leader(partial(self._report_progress, step, False))
            yield entry.window() or list(map(open_landed, entry.landed))
        while not isinstance(self._ranks.from_leader(partial(self._report_progress, step, True)), EndOfStep):
            pass  # the launcher's sign of life

    def _report_progress(self, step: int, done: bool) -> EndOfStep | messages.StillWaiting:
        return self._control.ask(messages.ReplayProgress(unit=self._ranks.unit, step=step, done=done))

    def heartbeat(self) -> None:
        """Sent by the unit's leader."""
        _send_heartbeat(self._control, self._ranks)

    def failed(self, error: MetronomeError) -> None:
        """Sent by the unit's leader."""
        _report_failure(error, self._control, self._ranks)


def _send_heartbeat(control: ControlClient, ranks: RankGroup) -> None:
    ranks.from_leader(lambda: control.ask(messages.Heartbeat(unit=ranks.unit)))


def _report_failure(error: MetronomeError, control: ControlClient, ranks: RankGroup) -> None:
    if ranks.leader:
        control.ask(messages.TrainerFailed(error=Failure.of(error)))


def _opened(given: Window | EarlyWork) -> Work:
    if isinstance(given, Window):
        return [open_group(group, given.batch) for group in given.groups]
    return list(map(open_landed, given.landed))
