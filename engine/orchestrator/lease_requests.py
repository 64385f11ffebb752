"""Answers the stages' requests for rows, and takes the columns that they write (AsyncFlow §3.3)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from engine.config import Config
from engine.errors import ServiceConflict, StoreError
from engine.orchestrator.batches_in_flight import BatchesInFlight
from engine.orchestrator.column_store import ColumnStore
from engine.orchestrator.liveness import Liveness
from engine.orchestrator.run_state import RunState
from engine.orchestrator.stages import StageWatch
from engine.orchestrator.table import Held, RowTable
from engine.orchestrator.weight_sync.publish_requests import PublishRequests
from engine.wire import messages
from engine.wire.messages import TRAIN, EndOfRun, EndOfStep, StillWaiting
from engine.wire.record import RecordWriter


class LeaseRequests:
    """Gives rows to stages, and takes their acknowledgements and columns. Each stage takes each row once."""

    def __init__(
        self,
        config: Config,
        run_state: RunState,
        table: RowTable,
        store: ColumnStore,
        watch: StageWatch,
        batches: BatchesInFlight,
        liveness: Liveness,
        publishing: Callable[[], PublishRequests | None],
    ) -> None:
        """`publishing`: returns what publishes weights; None for a replay."""
        self._config = config
        self._run_state = run_state
        self._table = table
        self._store = store
        self._watch = watch
        self._batches = batches
        self._liveness = liveness
        self._publishing = publishing
        self._idle_since: float | None = None
        """Monotonic time since which the trainer has held no lease and has waited for one."""
        self.recorder: RecordWriter | None = None
        """Records what the trainer's replica groups are given (train.record)."""
        self.is_over = False
        """Whether the last step is trained, so that no stage has work left."""
        self._positions: dict[int, int | None] = {}
        """For the step that ended last: the position at which the prompts of the next step begin."""

    def end_step(self, step: int, prompt_position: int | None) -> None:
        """End a step. `prompt_position`: where the prompts of the next step begin, with dynamic sampling."""
        self._positions = {step: prompt_position}

    async def lease_window(self, request: messages.Lease) -> messages.Work:
        """Acknowledge what a stage has finished, and reply with what it does next."""
        stage = self._watch.find_stage(request.stage)
        self._table.check_asked(stage.name, request.columns)
        self._watch.note_request(stage.name, time.monotonic())
        await self._acknowledge(request)
        if not request.budget:
            return StillWaiting()
        found: messages.Work | None = await self._run_state.wait_briefly(
            partial(self._next_reply, request, self._watch.restarts(stage.name))
        )
        if isinstance(found, messages.Window):
            found = await self._opened(found)
        if request.replica_group is not None and request.stage == TRAIN:
            self._note_given(request.replica_group, found)
        return found or StillWaiting()

    async def _acknowledge(self, request: messages.Lease) -> None:
        for number in request.done:
            held = self._table.held(number)
            if held.stage != request.stage:
                raise ServiceConflict(f"lease {number} is one of the stage {held.stage!r}, not of {request.stage!r}")
            done = self._table.acknowledge_lease(number)
            ledger = self._table.ledger(held.step, held.stage)
            if done and ledger.is_over:
                last = held.stage == TRAIN and held.step == self._config.train.steps - 1
                self.is_over = self.is_over or last
            if done and (ledger.is_over or ledger.replica_groups > 1):
                # others wait for the end of the step, and the replica group's request ahead is now an ordinary one
                await self._run_state.notify()

    def _note_given(self, replica_group: int, given: messages.Work | None) -> None:
        if isinstance(given, EndOfStep):
            self._liveness.expect_no_more(replica_group)
        elif isinstance(given, messages.Window) and self.recorder is not None:
            self.recorder.add_window(replica_group, given)

    def _next_reply(self, request: messages.Lease, restarts: int) -> messages.Work | None:
        """Return the next work, or tell the trainer to publish the step's version again, or None."""
        publishing = self._publishing()
        if request.stage != TRAIN or publishing is None:
            return self._next_work(request, restarts)
        if publishing.goes_again:  # from now on no replica group gets a window
            self._run_state.check_failure()
        elif (work := self._next_work(request, restarts)) is not None:
            self._idle_since = None
            return work
        elif not self._decides_again(publishing, request.step):
            return None
        assert publishing.verified is not None
        return messages.PublishAgain(publishing.verified)

    def _decides_again(self, publishing: PublishRequests, step: int | None) -> bool:
        """Return whether the step's version goes again. It does so only while the whole trainer waits: a replica group
        that still trains would meet the others in a collective of another kind."""
        if step not in (None, publishing.verified) or self._table.oldest_lease(TRAIN) is not None:
            self._idle_since = None
            return False
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        return publishing.decide_again(now - self._idle_since)

    def _next_work(self, request: messages.Lease, restarts: int) -> messages.Work | None:
        """Return the end of step or run, else a window, else None.

        `restarts`: restarts of the stage's ranks when the request arrived. Ranks that have gone since get nothing.
        """
        if self._watch.restarts(request.stage) != restarts:
            return StillWaiting()
        if (end := self._end_for(request)) is not None:
            return end
        self._run_state.check_failure()  # a run that is stopping gives no more leases
        self._batches.check_step(request.step)
        if request.step is not None and request.step not in self._table.steps:
            return None
        held = self._table.lease_window(
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
        step = request.step
        if step is None:
            return EndOfRun() if self.is_over else None
        if step in self._table.steps:
            over = self._table.ledger(step, request.stage).is_over
            batch = self._batches.get_batch(step)
            return EndOfStep(batch.next_position if batch is not None else None) if over else None
        publishing = self._publishing()
        version = publishing.version if publishing is not None else None
        ended = step in self._positions or (version is not None and step < version)
        return EndOfStep(self._positions.get(step)) if ended else None

    def _window(self, held: Held, columns: tuple[str, ...]) -> messages.Window:
        rows = self._table.given_rows(held, columns)
        return messages.Window(
            step=held.step,
            rows=rows,
            batch=self._table.batch_scores(held.step, self._config.reward_weights) if held.stage == TRAIN else None,
            lease=held.number,
            lease_s=self._table.stages[held.stage].lease_s,
            deliveries=held.deliveries,
            generated=all(batch.generated for batch in self._batches.values()),
        )

    async def _opened(self, window: messages.Window) -> messages.Window | StillWaiting:
        """Return a leased window with the bodies of its columns. A store that has lost one stops the run, unless the
        step is over by now."""
        try:
            return replace(window, rows=tuple(await self._store.get_columns(window.rows)))
        except StoreError as error:
            if window.step not in self._table.steps:
                return StillWaiting()
            await self._run_state.stop_run(error)
            raise

    async def write_columns(self, request: messages.WriteColumns) -> messages.Taken:
        """Write a stage's columns for the rows of a lease."""
        self._run_state.check_failure()
        stage = self._watch.find_stage(request.stage)
        held = self._table.held(request.lease)
        for written in request.rows:
            self._watch.check_columns(held.step, written)
        new = self._table.write_columns(request.stage, request.lease, request.rows)
        self._watch.note_written(stage.name, time.monotonic())
        await self._run_state.notify()
        return messages.Taken(new)
