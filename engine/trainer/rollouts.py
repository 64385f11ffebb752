"""Where the loop's groups come from: the running instances, or a record of an earlier run (`Replay`).

Only a replica group's leader asks the orchestrator. It passes every reply, including signs of life, to all ranks of the
replica group over the CPU channel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from engine.client.connection import Connection
from engine.client.publish.publisher import PublishedModel, Publisher
from engine.client.ranks import Ranks
from engine.client.service import ServiceClient
from engine.config import Config
from engine.errors import BadInput, MetronomeError
from engine.run.process import in_thread
from engine.types import Group
from engine.wire import messages
from engine.wire.columns import open_group
from engine.wire.messages import EndOfStep, PublishAgain, StillWaiting, Window
from engine.wire.record import RecordEntry, read_record


class Replay:
    """One replica group's work of a recorded run, step by step. It replaces the table."""

    def __init__(self, path: Path, replica_group: int, expected: int, reward_weights: Mapping[str, float]) -> None:
        """`expected`: number of groups in a complete step."""
        self._expected = expected
        self._weights = reward_weights
        self._mine: dict[int, list[RecordEntry]] = {}
        self._groups: dict[int, int] = {}
        for entry in read_record(path):
            self._groups[entry.step] = self._groups.get(entry.step, 0) + entry.size
            if entry.replica_group == replica_group:
                self._mine.setdefault(entry.step, []).append(entry)

    def windows(self, step: int) -> Iterator[list[Group]]:
        """Yield the replica group's windows of a step. Raises BadInput unless the record has all groups of the
        step."""
        count = self._groups.get(step, 0)
        if count != self._expected:
            raise BadInput(
                f"--replay: the record holds {count} groups of step {step}, train.prompts_per_step is "
                f"{self._expected}; replay with the recorded run's own config.toml and no more steps than it trained"
            )
        for entry in self._mine.get(step, []):
            yield entry.window(self._weights)


Prepare = Callable[[list[Group]], None]
"""Does the work that needs no weights for a window that is trained next."""


class Rollouts:
    """The inference side, as the loop uses it; what both kinds of rollouts tell the orchestrator.

    `windows` and `heartbeat` are collectives over a replica group's ranks. `failed` is not a collective. All other
    methods are collectives over all ranks.
    """

    prompt_position: int | None = None
    """With dynamic sampling: position of the first prompt of the next step; else None."""
    prompts: str | None = None
    """Fingerprint of the run's prompts. Before `begin` it is the checkpoint's, or None."""
    notices: tuple[str, ...] = ()
    """What the run's user should see of the checkpoint."""

    def __init__(self, control: Connection, ranks: Ranks) -> None:
        self._control = control
        self._ranks = ranks

    def begin(self, start: int) -> None:
        """Tell the orchestrator that the trainer is ready and starts with step `start`."""
        self._tell_ready(start, None, None)

    def _tell_ready(self, start: int, prompt_position: int | None, prompts: str | None) -> str | None:
        """Return the fingerprint of the orchestrator's prompts."""
        ready = messages.Ready(
            start=start,
            prompt_position=prompt_position,
            prompts=prompts,
            replica_groups=self._ranks.replica_groups,
            notices=self.notices,
        )
        return self._ranks.from_first(lambda: self._control.ask(ready)).fingerprint

    def publish(self, model: PublishedModel, version: int) -> float:
        """Give every instance exactly this version of the policy. Return the seconds that this blocked the trainer."""
        return 0.0

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights that this rank sent in the last publish."""
        return 0

    def verify(self, model: PublishedModel, version: int) -> None:
        """Check, after `publish`, that the instances compute with the policy's weights.

        The instances keep sampling during the check. If they load weights in the background, this does not wait for the
        check.
        """

    def start(self, step: int) -> None:
        """Start the step's batch of prompts in the background."""

    def windows(self, step: int, prepare: Prepare) -> Iterator[list[Group]]:
        """Yield the replica group's windows of the step, each as soon as it is available. Collective over the replica
        group.

        `prepare` may be called with a window before the window is yielded, from another thread.
        """
        raise NotImplementedError

    def heartbeat(self) -> None:
        """Send a sign of life from the replica group's leader, during long work without other requests. Raises the
        error that has ended the run, if there is one."""
        beat = messages.Heartbeat(replica_group=self._ranks.replica_group)
        self._ranks.from_leader(lambda: self._control.ask(beat))

    def failed(self, error: MetronomeError) -> None:
        """Tell the orchestrator, and through it the other replica groups, that this replica group has failed with an
        error. Its leader does."""
        if self._ranks.leader:
            self._control.tell_failure(error)


class LiveRollouts(Rollouts):
    """The running instances, reached through the plane."""

    def __init__(
        self,
        control: Connection,
        ranks: Ranks,
        publisher: Publisher,
        config: Config,
        prefetch: bool = False,
    ) -> None:
        """`prefetch`: whether a thread leases and prepares the next window while one is trained."""
        super().__init__(control, ranks)
        self._publisher = publisher
        self._config = config
        self._ahead = prefetch
        self._model: PublishedModel | None = None
        """The model of the last publish. The policy does not change while it waits for rows."""

    @classmethod
    def of(cls, service: ServiceClient, ranks: Ranks | None = None) -> LiveRollouts:
        """Return the rollouts of an external program with these ranks; None means one rank."""
        alone = ranks or Ranks()
        return cls(
            control=service.connection,
            ranks=alone,
            publisher=service.publisher(alone),
            config=service.config,
            prefetch=service.config.train.prefetch == "on",
        )

    def begin(self, start: int) -> None:
        """Tell the orchestrator that the trainer is ready. The orchestrator compares the prompts with the
        checkpoint's."""
        self.prompts = self._tell_ready(start, self.prompt_position, self.prompts) or self.prompts

    def publish(self, model: PublishedModel, version: int) -> float:
        """Wait until publishing is allowed, then give every instance the version. Return the seconds that both took."""
        self._model = model
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

    def start(self, step: int) -> None:
        """Ask the orchestrator to start the batch."""
        self._ranks.from_first(lambda: self._control.ask(messages.PutPrompts(step=step)))

    def windows(self, step: int, prepare: Prepare) -> Iterator[list[Group]]:
        """Lease windows from the table until the replica groups have trained all groups of the step.

        While one window is trained, a thread requests, opens and prepares the next one. Each request also acknowledges
        the windows whose gradient has been added, so a window usually costs one round trip. If late instances wait for
        weights while all replica groups wait for rows, this publishes the step's version again.
        """
        done: tuple[int, ...] = ()
        coming: Future[tuple[messages.Work, list[Group]]] | None = None
        while True:
            if coming is None:
                reply = self._ranks.from_leader(partial(self._lease, step, done))
                opened = self._opened(reply)
                done = ()
            else:
                done = self._acknowledge(step, done, coming)
                reply, opened = coming.result()
                coming = None
            if isinstance(reply, EndOfStep):
                self.prompt_position = reply.prompt_position
                return
            if isinstance(reply, PublishAgain):
                self._publish_again(reply.version)
            if isinstance(reply, Window) and self._ahead:
                coming = in_thread("next window", partial(self._look_ahead, step, done, prepare))
                done = ()
            if isinstance(reply, Window):  # otherwise it is a sign of life: ask again
                yield opened
                done += (reply.lease,)

    def _publish_again(self, version: int) -> None:
        """Give the last version to the instances that lack it. Every replica group is asked to, so it is a collective
        of all ranks."""
        assert self._model is not None, "a step is trained after its version was published"
        self._publisher.publish(self._model, version, again=True)
        self._publisher.verify(self._model, version)

    def _look_ahead(self, step: int, done: tuple[int, ...], prepare: Prepare) -> tuple[messages.Work, list[Group]]:
        """Ask once for the next window and prepare it. Collective over the replica group; it runs in a thread next to
        training."""
        reply = self._ranks.from_leader_beside(partial(self._lease, step, done, ahead=True))
        opened = self._opened(reply)
        if isinstance(reply, Window):
            prepare(opened)
        return reply, opened

    def _acknowledge(self, step: int, done: tuple[int, ...], coming: Future[Any]) -> tuple[int, ...]:
        """Acknowledge trained windows while the request for the next window waits: it may wait for this very
        acknowledgement. Return the leases not yet acknowledged (all of them after an error, which the next request
        raises on all ranks of the replica group instead of on one)."""
        if not self._ranks.leader or coming.done():
            return done
        replica_group = self._ranks.replica_group
        try:
            self._control.ask(
                messages.Lease(replica_group=replica_group, step=step, budget=0, done=done, consumer=self._ranks.name)
            )
        except MetronomeError:
            return done
        return ()

    def _lease(self, step: int, done: tuple[int, ...], ahead: bool = False) -> messages.Work:
        """Return the replica group's next work."""
        return self._control.ask(
            messages.Lease(
                replica_group=self._ranks.replica_group,
                step=step,
                budget=self._config.window_tokens,
                done=done,
                consumer=self._ranks.name,
                ahead=ahead,
            )
        )

    def _opened(self, given: messages.Work) -> list[Group]:
        """Return the groups of a reply; [] if it has none."""
        if not isinstance(given, Window):
            return []
        weights = self._config.reward_weights
        return [open_group(row, given.batch, reward_weights=weights) for row in given.rows]


class ReplayedRollouts(Rollouts):
    """A record instead of instances: nothing is published or started."""

    def __init__(self, path: Path, control: Connection, ranks: Ranks, config: Config) -> None:
        super().__init__(control, ranks)
        self._replay = Replay(path, ranks.replica_group, config.train.prompts_per_step, config.reward_weights)

    def windows(self, step: int, prepare: Prepare) -> Iterator[list[Group]]:
        """Yield the replica group's recorded windows of the step in recorded order, then wait until all replica groups
        are done."""
        for window in self._replay.windows(step):
            self._ranks.from_leader(partial(self._report_progress, step, False))
            yield window
        while not isinstance(self._ranks.from_leader(partial(self._report_progress, step, True)), EndOfStep):
            pass  # the orchestrator's sign of life

    def _report_progress(self, step: int, done: bool) -> EndOfStep | StillWaiting:
        return self._control.ask(messages.ReplayProgress(replica_group=self._ranks.replica_group, step=step, done=done))
