"""The source of the loop's groups: the running instances, or a record of an earlier run (`Replay`).

A unit's leader asks the orchestrator. Every reply, signs of life included, goes to all ranks of the unit over the CPU
channel.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from engine.client.connection import Connection
from engine.client.publish.publisher import PublishedModel, Publisher
from engine.client.ranks import OneRank, Ranks
from engine.client.service import ServiceClient
from engine.client.stored_bodies import StoredBodies
from engine.config import Config
from engine.errors import BadInput, DeadlineError, MetronomeError
from engine.run.threads import in_thread
from engine.types import Group, Landed
from engine.wire import messages
from engine.wire.columns import open_group, open_landed
from engine.wire.messages import EarlyWork, EndOfStep, StillWaiting, Window
from engine.wire.record import RecordEntry, read_record
from engine.wire.store_client import StoreFault


class Replay:
    """One unit's work of a recorded run, step by step. It takes the place of the table."""

    def __init__(self, path: Path, unit: int, expected: int, reward_weights: Mapping[str, float]) -> None:
        """`expected`: groups of a complete step."""
        self._expected = expected
        self._weights = reward_weights
        self._mine: dict[int, list[RecordEntry]] = {}
        self._groups: dict[int, int] = {}
        for entry in read_record(path):
            self._groups[entry.step] = self._groups.get(entry.step, 0) + entry.size
            if entry.unit == unit:
                self._mine.setdefault(entry.step, []).append(entry)

    def work(self, step: int) -> Iterator[list[Group] | list[Landed]]:
        """Yield the unit's windows and early work of a step. Raises BadInput unless all groups of the step were
        recorded."""
        count = self._groups.get(step, 0)
        if count != self._expected:
            raise BadInput(
                f"--replay: the record holds {count} groups of step {step}, train.prompts_per_step is "
                f"{self._expected}; replay with the recorded run's own config.toml and no more steps than it trained"
            )
        for entry in self._mine.get(step, []):
            yield entry.window(self._weights) or list(map(open_landed, entry.landed))


Work = list[Group] | list[Landed]
"""A window to train, or responses to score early."""

R = TypeVar("R")

Prepare = Callable[[list[Group]], None]
"""Does what needs no weights with a window that is trained next."""


class Rollouts(Protocol):
    """The inference side, as the loop uses it.

    `work` and `heartbeat` are collectives of a unit's ranks; `settle` and `failed` are no collectives; the others are
    collectives of all ranks.
    """

    prompt_position: int | None
    """With dynamic sampling: position at which the prompts begin of the step after the last one; else None."""

    def begin(self, start: int) -> None:
        """Say that the trainer is ready and begins with step `start`."""

    def publish(self, model: PublishedModel, version: int) -> float:
        """Give every instance exactly this version of the policy. Return the seconds that it blocked the trainer."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of the weights that this rank sent in the last publish."""

    def verify(self, model: PublishedModel, version: int) -> None:
        """Check, after `publish`, that the instances compute with the policy's weights.

        They sample meanwhile. Where they take weights over in the background, this does not wait for the check.
        """

    def settle(self) -> None:
        """Wait until nothing reads the published weights any more, before the policy changes them. No collective."""

    def start(self, step: int) -> None:
        """Start the step's batch of prompts in the background."""

    def work(self, step: int, prepare: Prepare) -> Iterator[Work]:
        """Yield the unit's work of the step, each piece as soon as it can be done. A collective of the unit.

        `prepare` may be called with a window before it is yielded, in a thread of its own.
        """

    def heartbeat(self) -> None:
        """Send a sign of life during long work that asks for nothing. A collective of the unit.

        Raises the error that has ended the run meanwhile.
        """

    def failed(self, error: MetronomeError) -> None:
        """Tell the orchestrator, and through it the other units, that this unit ends with an error."""


class LiveRollouts:
    """The running instances, reached through the plane."""

    def __init__(
        self,
        control: Connection,
        ranks: Ranks,
        publisher: Publisher,
        config: Config,
        early: bool = False,
        bodies: StoredBodies | None = None,
        prefetch: bool = False,
    ) -> None:
        """`early`: whether the trainer scores responses before their group is complete; `bodies`: fetches the bodies of
        columns that lie outside the orchestrator; `prefetch`: whether the next window is leased and prepared, in a
        thread, while one is trained. With `early` or `bodies` it is not."""
        self._bodies = bodies
        self._control = control
        self._ranks = ranks
        self._publisher = publisher
        self._config = config
        self._early = early
        self._ahead = prefetch and not early and bodies is None
        self.prompt_position: int | None = None
        self.prompts: str | None = None
        """The fingerprint of the run's prompts; before `begin` that of a checkpoint, or None."""

    @classmethod
    def of(cls, service: ServiceClient, ranks: Ranks | None = None) -> LiveRollouts:
        """Those of a program outside, whose ranks are `ranks`; None: one."""
        alone = ranks or OneRank()
        early = service.config.train.score_early
        publisher = service.publisher(alone)
        prefetch = service.config.train.prefetch == "on"
        return cls(
            control=service.connection,
            ranks=alone,
            publisher=publisher,
            config=service.config,
            early=early,
            prefetch=prefetch,
        )

    def begin(self, start: int) -> None:
        """Tell the orchestrator, which compares the prompts with those of the checkpoint."""
        ready = messages.Ready(
            start=start, prompt_position=self.prompt_position, prompts=self.prompts, units=self._ranks.units
        )
        self.prompts = self._ranks.from_first(lambda: self._control.ask(ready)).fingerprint or self.prompts

    def publish(self, model: PublishedModel, version: int) -> float:
        """Wait until weights may move, then give every instance the version. Return the seconds of both."""
        started = time.perf_counter()
        may_publish = messages.MayPublish(version=version)
        while not self._ranks.from_first(lambda: self._control.ask(may_publish)).now:
            pass  # the orchestrator's sign of life
        waited = time.perf_counter() - started
        return waited + self._publisher.publish(model, version)

    @property
    def sent_bytes(self) -> int:
        """See `Publisher.sent_bytes`."""
        return self._publisher.sent_bytes

    def verify(self, model: PublishedModel, version: int) -> None:
        """See `Publisher.verify`."""
        self._publisher.verify(model, version)

    def settle(self) -> None:
        """See `Publisher.settle`."""
        self._publisher.settle()

    def start(self, step: int) -> None:
        """Ask the orchestrator to start the batch, unless programs put its groups."""
        if not self._config.data.pushed:
            self._ranks.from_first(lambda: self._control.ask(messages.PutPrompts(step=step)))

    def work(self, step: int, prepare: Prepare) -> Iterator[Work]:
        """Lease windows from the table until the units have trained all groups of the step.

        While a window is trained, the next one is asked for, opened and prepared in a thread. A request acknowledges
        the windows before whose gradient is in: mostly one round trip a window. Raises DeadlineError if nothing comes
        for train.timeout_s of a step whose groups programs put.
        """
        done: tuple[int, ...] = ()
        last = time.monotonic()
        coming: Future[tuple[messages.Work, Work]] | None = None
        while True:
            if coming is None:
                reply = self._ranks.from_leader(partial(self._lease, step, done, last))
                opened = self._opened(reply)
                done = ()
            else:
                done = self._acknowledge(step, done, coming)
                reply, opened = coming.result()
                coming = None
            if isinstance(reply, EndOfStep):
                self.prompt_position = reply.prompt_position
                return
            if isinstance(reply, Window) and self._ahead:
                coming = in_thread("next window", partial(self._look_ahead, step, done, prepare))
                done = ()
            if opened:  # else a sign of life: ask again
                yield opened
                last = time.monotonic()
                done += (reply.lease,) if isinstance(reply, Window) else ()

    def _look_ahead(self, step: int, done: tuple[int, ...], prepare: Prepare) -> tuple[messages.Work, Work]:
        """Ask once for the next window, and prepare it. A collective of the unit's threads beside training."""
        reply = self._ranks.from_leader_beside(partial(self._lease, step, done, time.monotonic(), ahead=True))
        opened = self._opened(reply)
        if isinstance(reply, Window):
            prepare(cast(list[Group], opened))
        return reply, opened

    def _acknowledge(self, step: int, done: tuple[int, ...], coming: Future[Any]) -> tuple[int, ...]:
        """Say what is trained while the request for the next window waits: it may wait for just that. Return what is
        left to be said; the next request raises an error on all ranks of the unit, where this one would on one."""
        if not self._ranks.leader or coming.done():
            return done
        unit = self._ranks.unit
        try:
            self._control.ask(messages.Lease(unit=unit, step=step, budget=0, done=done, consumer=self._ranks.name))
        except MetronomeError:
            return done
        return ()

    def _lease(self, step: int, done: tuple[int, ...], last: float, ahead: bool = False) -> messages.Work:
        """Return what the unit does next. A sign of life while the bodies of a window are being fetched."""
        limit = self._config.train.timeout_s
        if self._config.data.pushed and time.monotonic() - last > limit:
            raise DeadlineError(f"no program has put a group of step {step} in {limit:g} s (train.timeout_s)")
        bodies = self._bodies
        ask = partial(
            messages.Lease,
            unit=self._ranks.unit,
            step=step,
            budget=self._config.window_tokens,
            done=done,
            consumer=self._ranks.name,
            ahead=ahead,
            early=self._early,
        )
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
            print(
                f"unit {self._ranks.unit} leaves lease {lease} to the orchestrator: {fault}",
                file=sys.stderr,
                flush=True,
            )
            return self._control.ask(ask(done=(), fetches=True, unfetched=lease))  # `done` was said
        self._control.ask(messages.Heartbeat(unit=self._ranks.unit))
        return StillWaiting()

    def _opened(self, given: messages.Work) -> Work:
        """The groups or responses of a reply; [] of one that has none."""
        if isinstance(given, Window):
            weights = self._config.reward_weights
            return [open_group(row, given.batch, reward_weights=weights) for row in given.rows]
        return list(map(open_landed, given.landed)) if isinstance(given, EarlyWork) else []

    def heartbeat(self) -> None:
        """Sent by the unit's leader."""
        _send_heartbeat(self._control, self._ranks)

    def failed(self, error: MetronomeError) -> None:
        """Sent by the unit's leader."""
        _report_failure(error, self._control, self._ranks)


class ReplayedRollouts:
    """A record in place of instances: nothing is published or started."""

    prompt_position: int | None = None
    prompts: str | None = None
    sent_bytes = 0

    def __init__(self, path: Path, control: Connection, ranks: Ranks, config: Config) -> None:
        self._replay = Replay(path, ranks.unit, config.train.prompts_per_step, config.reward_weights)
        self._control = control
        self._ranks = ranks

    def begin(self, start: int) -> None:
        """Tell the orchestrator."""
        ready = messages.Ready(start=start, prompt_position=None, prompts=None, units=self._ranks.units)
        self._ranks.from_first(lambda: self._control.ask(ready))

    def publish(self, model: PublishedModel, version: int) -> float:
        """There are no instances. Return 0."""
        return 0.0

    def verify(self, model: PublishedModel, version: int) -> None:
        """Nothing was published."""

    def settle(self) -> None:
        """Nothing was published."""

    def start(self, step: int) -> None:
        """Nothing to start."""

    def work(self, step: int, prepare: Prepare) -> Iterator[Work]:
        """Yield the unit's recorded work of the step in the recorded order, then wait until all units are done."""
        for work in self._replay.work(step):
            self._ranks.from_leader(partial(self._report_progress, step, False))
            yield work
        while not isinstance(self._ranks.from_leader(partial(self._report_progress, step, True)), EndOfStep):
            pass  # the orchestrator's sign of life

    def _report_progress(self, step: int, done: bool) -> EndOfStep | StillWaiting:
        return self._control.ask(messages.ReplayProgress(unit=self._ranks.unit, step=step, done=done))

    def heartbeat(self) -> None:
        """Sent by the unit's leader."""
        _send_heartbeat(self._control, self._ranks)

    def failed(self, error: MetronomeError) -> None:
        """Sent by the unit's leader."""
        _report_failure(error, self._control, self._ranks)


def _send_heartbeat(control: Connection, ranks: Ranks) -> None:
    ranks.from_leader(lambda: control.ask(messages.Heartbeat(unit=ranks.unit)))


def _report_failure(error: MetronomeError, control: Connection, ranks: Ranks) -> None:
    if ranks.leader:
        control.tell_failure(error)
