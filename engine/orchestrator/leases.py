"""Gives the stages rows of the steps in progress, and takes the columns that they write (AsyncFlow §3.3). Sees which
stage, and which replica group of the trainer, is silent."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from msgspec.structs import replace

from engine.config import Config
from engine.config.stages import REFERENCE_STAGE
from engine.errors import BadInput, ServiceConflict, StoreError
from engine.orchestrator.publish.publishes import Publishes, State
from engine.orchestrator.run_state import RunState
from engine.orchestrator.stages import check_columns, scorer_log
from engine.orchestrator.steps import Held, StageRules, Steps
from engine.run.folder import RunFolder
from engine.types import JsonObject
from engine.wire import messages
from engine.wire.messages import TRAIN, EndOfRun, EndOfStep, StillWaiting
from engine.wire.record import FILE, RecordWriter


class Leases:
    """Gives rows to stages, and takes their acknowledgements and columns. Each stage takes each row once.

    It keeps when each stage last asked, and when the trainer and each of its replica groups were last heard from, so
    that requests of the others can't hide one that hangs. A replica group is not silent while it waits for a reply, or
    when it has nothing left to do in the step.
    """

    def __init__(
        self, config: Config, run_state: RunState, steps: Steps, folder: RunFolder, publishes: Publishes | None
    ) -> None:
        """`publishes`: None in a replay, which leases nothing."""
        self._config = config
        self._run_state = run_state
        self._steps = steps
        self._folder = folder
        self._publishes = publishes
        self._recorder: RecordWriter | None = None
        """Records what the trainer's replica groups are given (train.record)."""
        self.is_over = False
        """Whether the last step is trained, so that no stage has work left."""
        self._asked: dict[str, float] = {}
        """By stage: when it last asked for rows, or wrote columns."""
        self._since: dict[str, tuple[float, int]] = {}
        """By stage: since when rows have waited without progress, and how many rows were done at that time."""
        self._written: Counter[str] = Counter()
        """By stage: how often it has written columns."""
        self._restarts: Counter[str] = Counter()
        """By stage: how often its ranks have gone. Requests that they sent before must get no rows."""
        self._idle_since: float | None = None
        """Since when the trainer has held no lease and has waited for one; None while it trains."""
        self._heard = time.monotonic()
        """When the trainer was last heard from."""
        self._answering = 0
        """Number of the trainer's requests that are being answered."""
        self._replica_groups: dict[int, float] = {}
        """By replica group with work left in the step: when it was last heard from; infinite while it waits for a
        reply."""

    async def begin_run(self, start: int) -> None:
        """Note that the trainer begins with step `start`, and open the record."""
        self.is_over = start >= self._config.train.steps
        if self._config.train.record and self._publishes is not None and self._recorder is None:
            self._recorder = await asyncio.to_thread(RecordWriter, self._folder.path / FILE, self._config, start)

    def flush_record(self) -> None:
        """Write what the step has added to the record to disk."""
        if self._recorder is not None:
            self._recorder.flush()

    # requests -------------------------------------------------------------------------------------

    async def lease_window(self, request: messages.Lease) -> messages.Work:
        """Acknowledge what a stage has finished, and reply with what it does next."""
        stage = self._find_stage(request.stage)
        self._steps.check_asked(stage.name, request.columns)
        self._asked[stage.name] = time.monotonic()
        await self._acknowledge(request)
        if not request.budget:
            return StillWaiting()
        found: messages.Work | None = await self._run_state.wait_briefly(
            partial(self._next_reply, request, self._restarts[stage.name])
        )
        if isinstance(found, messages.Window):
            found = await self._opened(found)
        if request.replica_group is not None and request.stage == TRAIN:
            self._note_given(request.replica_group, found)
        return found or StillWaiting()

    def _find_stage(self, name: str) -> StageRules:
        if name not in self._steps.stages:
            raise BadInput(
                f"there is no stage {name!r} in the recipe, whose stages are {', '.join(sorted(self._steps.stages))}. "
                f"To add it, declare [stages.{name}]"
            )
        return self._steps.stages[name]

    async def _acknowledge(self, request: messages.Lease) -> None:
        for number in request.done:
            held = self._steps.held(number)
            if held.stage != request.stage:
                raise ServiceConflict(f"lease {number} is one of the stage {held.stage!r}, not of {request.stage!r}")
            done = self._steps.acknowledge_lease(number)
            ledger = self._steps.ledger(held.step, held.stage)
            if done and ledger.is_over:
                last = held.stage == TRAIN and held.step == self._config.train.steps - 1
                self.is_over = self.is_over or last
            if done and (ledger.is_over or ledger.replica_groups > 1):
                # others wait for the end of the step, and the replica group's request ahead is now an ordinary one
                await self._run_state.notify()

    def _note_given(self, replica_group: int, given: messages.Work | None) -> None:
        if isinstance(given, EndOfStep):
            self._replica_groups.pop(replica_group, None)  # it waits for the others
        elif isinstance(given, messages.Window) and self._recorder is not None:
            self._recorder.add_window(replica_group, given)

    def _next_reply(self, request: messages.Lease, restarts: int) -> messages.Work | None:
        """Return the next work, or tell the trainer to publish the step's version again, or None."""
        publishes = self._publishes
        if request.stage != TRAIN or publishes is None:
            return self._next_work(request, restarts)
        if publishes.state is State.AGAIN:  # from now on no replica group gets a window
            self._run_state.check_failure()
        elif (work := self._next_work(request, restarts)) is not None:
            self._idle_since = None
            return work
        elif not self._decides_again(publishes, request.step):
            return None
        assert publishes.verified is not None
        return messages.PublishAgain(publishes.verified)

    def _decides_again(self, publishes: Publishes, step: int | None) -> bool:
        """Return whether the step's version goes again. It does so only while the whole trainer waits: a replica group
        that still trains would meet the others in a collective of another kind."""
        if step not in (None, publishes.verified) or self._steps.oldest_lease(TRAIN) is not None:
            self._idle_since = None
            return False
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        return publishes.decide_again(now - self._idle_since)

    def _next_work(self, request: messages.Lease, restarts: int) -> messages.Work | None:
        """Return the end of step or run, else a window, else None.

        `restarts`: restarts of the stage's ranks when the request arrived. If they were restarted since, its sender is
        dead: the reply is StillWaiting.
        """
        if self._restarts[request.stage] != restarts:
            return StillWaiting()
        if (end := self._end_for(request)) is not None:
            return end
        self._run_state.check_failure()  # a run that is stopping gives no more leases
        self._steps.check_dropped(request.step)
        if request.step is not None and self._steps.find(request.step) is None:
            return None
        held = self._steps.lease_window(
            stage=request.stage,
            step=request.step,
            replica_group=request.replica_group or 0,
            budget=request.budget,
            consumer=request.consumer,
            now=time.monotonic(),
            ahead=request.ahead,
        )
        return None if held is None else self._window(held, request.columns)

    def _end_for(self, request: messages.Lease) -> EndOfStep | EndOfRun | None:
        if request.step is None:
            return EndOfRun() if self.is_over else None
        if (step := self._steps.find(request.step)) is not None:
            return EndOfStep(step.next_position) if step.ledgers[request.stage].is_over else None
        last = self._steps.last
        if last is not None and last.number == request.step:
            return EndOfStep(last.next_position)
        version = self._publishes.version if self._publishes is not None else None
        return EndOfStep() if version is not None and request.step < version else None

    def _window(self, held: Held, columns: tuple[str, ...]) -> messages.Window:
        rows = self._steps.given_rows(held, columns)
        return messages.Window(
            step=held.step,
            rows=rows,
            batch=self._steps.batch_scores(held.step, self._config.reward_weights) if held.stage == TRAIN else None,
            lease=held.number,
            lease_s=self._steps.stages[held.stage].lease_s,
            deliveries=held.deliveries,
        )

    async def _opened(self, window: messages.Window) -> messages.Window | StillWaiting:
        """Return a leased window with the bodies of its columns. A store that has lost one stops the run, unless the
        step is over by now."""
        try:
            return replace(window, rows=tuple(await self._steps.store.get_columns(window.rows)))
        except StoreError as error:
            if self._steps.find(window.step) is None:
                return StillWaiting()
            await self._run_state.stop_run(error)
            raise

    async def write_columns(self, request: messages.WriteColumns) -> messages.Taken:
        """Write a stage's columns for the rows of a lease."""
        self._run_state.check_failure()
        stage = self._find_stage(request.stage)
        held = self._steps.held(request.lease)
        for written in request.rows:
            row = self._steps.find_row(held.step, written.index)
            if row is None:
                raise BadInput(f"step {held.step} has no group {written.index}")
            check_columns(row, written, self._config.reward_weights)
        new = self._steps.write_columns(request.stage, request.lease, request.rows)
        self._asked[stage.name] = time.monotonic()
        self._written[stage.name] += 1
        await self._run_state.notify()
        return messages.Taken(new)

    # the trainer ----------------------------------------------------------------------------------

    @contextmanager
    def answering(self, replica_group: int | None) -> Iterator[None]:
        """Enter this context while a request of the trainer is answered. It is a sign of life of the trainer and of the
        replica group that asks.

        `replica_group` None means that rank 0 asks for all replica groups, and all of them wait for the reply.
        """
        self._answering += 1
        self._note_sign_of_life(replica_group, math.inf)
        try:
            yield
        finally:
            self._answering -= 1
            self._heard = time.monotonic()
            self._note_sign_of_life(replica_group, self._heard)

    def _note_sign_of_life(self, replica_group: int | None, when: float) -> None:
        if replica_group is None:
            self._replica_groups = dict.fromkeys(self._replica_groups, when)
        elif replica_group in self._replica_groups:
            self._replica_groups[replica_group] = when

    def expect_requests(self) -> None:
        """Expect requests of each replica group from now on, until it is told that the step has no more groups."""
        self._replica_groups = dict.fromkeys(range(self._steps.replica_groups), time.monotonic())

    def silent_longer_than(self, seconds: float) -> str | None:
        """Return "the trainer" or "replica group 1 of the trainer" if it has been silent for longer than `seconds`;
        else None."""
        now = time.monotonic()
        if not self._answering and now - self._heard > seconds:
            return "the trainer"
        silent = (number for number, heard in self._replica_groups.items() if now - heard > seconds)
        return next((f"replica group {number} of the trainer" for number in silent), None)

    # the other stages -----------------------------------------------------------------------------

    def written(self, name: str) -> int:
        """Return how often the stage has written columns so far."""
        return self._written[name]

    def give_again(self, name: str) -> None:
        """Give what the ranks of a stage held to others, because these ranks are gone. The new ranks may take their
        time before they ask."""
        self._asked.pop(name, None)
        self._restarts[name] += 1
        self._steps.expire(name)

    def hanging(self, name: str, now: float) -> str:
        """Say why living ranks of a stage count as hanging; "" if they don't. They hang if they hold a window longer
        than the stage's `lease_s`, or request nothing for that long while rows wait."""
        limit = self._config.stages[name].lease_s
        held = self._steps.oldest_lease(name)
        if held is not None:
            late = f"they have held groups {list(held.indices)} of step {held.step} for more than {limit:g} s"
            return f"{late} (stages.{name}.lease_s)" if now - held.given > limit else ""
        waiting, _ = self._steps.waiting(name)
        silent = now - self._asked.get(name, now)
        return (
            (f"{waiting} groups are waiting, and they have asked for none in {silent:.0f} s")
            if waiting and silent > limit
            else ""
        )

    def late_stage(self, now: float) -> str:
        """Say for which stage rows have waited longer than its `wait_s` without progress; "" if for none."""
        for name, stage in self._config.stages.items():
            waiting, done = self._steps.waiting(name)
            since, before = self._since.get(name, (now, done))
            if not waiting or done != before:
                since = now
            self._since[name] = (since, done)
            if now - since > stage.wait_s:
                return (
                    f"{waiting} groups of steps {self._steps.numbers} have waited {stage.wait_s:g} s "
                    f"(stages.{name}.wait_s) for the stage {name!r}: {self._what_it_does(name)}"
                )
        return ""

    def _what_it_does(self, name: str) -> str:
        own = name == REFERENCE_STAGE
        if name in self._asked:
            found = "it makes no progress"
        else:
            found = "its ranks have not asked for rows" if own else "no program has asked for its rows"
        return f"{found}; their log: {scorer_log(self._folder.logs, name)}" if own else found

    def status(self) -> JsonObject:
        """Return by stage the rows that wait for it and the rows that it has finished, over the steps in progress."""
        found: JsonObject = {}
        for name in self._steps.stages:
            waiting, done = self._steps.waiting(name)
            found[name] = {"waiting": waiting, "done": done}
        return found
