"""The steps in progress: their rows and columns, and which rows each stage has taken (AsyncFlow §3.2 and §3.3).

Pure bookkeeping: no I/O, and no clock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from engine.errors import BadInput, MetronomeError, ServiceConflict
from engine.orchestrator.column_store import ColumnStore, MemoryStore
from engine.orchestrator.ledger import Ledger, Windows
from engine.types import BatchScores
from engine.wire.columns import OWN, Column, Row, batch_scores
from engine.wire.messages import TRAIN, Written

EXPIRED = float("-inf")
"""`Held.given` of a lease whose consumer is gone."""


@dataclass(frozen=True)
class StageRules:
    """A consumer of rows, which may add columns to them."""

    name: str
    needs: frozenset[str]
    """Columns that a row must have to be ready for the stage."""
    gives: frozenset[str] = frozenset()
    """Columns that the stage writes. A row is done once all of them are written. If empty, rows are acknowledged
    instead."""
    lease_s: float | None = None
    """Seconds after which rows may be leased again; None: never within the step."""
    windows: Windows = Windows()
    whole: bool = False
    """Whether rows become ready only when every row of the step has the needed columns (advantages of batch scope)."""


@dataclass(frozen=True)
class Held:
    """A leased window whose rows the stage has not finished."""

    number: int
    stage: str
    step: int
    indices: tuple[int, ...]
    consumer: str
    given: float
    """When it was leased, by the caller's clock (`now` of `Steps.lease_window`)."""
    deliveries: int = 1
    """How often these rows have been leased, including this time."""


@dataclass(eq=False)
class Step:
    """One step, from its start to its report."""

    number: int
    expected: int
    """Number of rows."""
    ledgers: dict[str, Ledger]
    """By stage."""
    rows: dict[int, Row] = field(default_factory=dict)
    """By index, in the order in which they were added."""
    held_back: dict[str, list[int]] = field(default_factory=dict)
    """By stage that needs whole steps: the rows with the needed columns, until every row has them."""
    batch: BatchScores | None = None
    """The scores of the whole batch, once they have been requested."""
    is_over: bool = False
    prompts: bytes = b""
    """Digest of the prompts that were put."""
    held_bytes: int = 0
    """Bytes of the prompts that a program has put."""
    samples: list[Row] = field(default_factory=list)
    """The first groups, which the run folder keeps for people to read."""
    task: asyncio.Task[None] | None = None
    """The task that generates the rows; None before it starts."""
    rollout_s: float = 0.0
    """Seconds from the start of generation until the last group arrived."""
    prompts_used: int | None = None
    """Number of prompts up to and including the last one that was kept; None without dynamic sampling, or while
    unknown."""
    reward_tried: float | None = None
    """Mean score of the responses to the first `prompts_used` prompts; None as above."""
    next_position: int | None = None
    """Position in the order of prompts at which the next step begins; None as above."""

    @property
    def arrived(self) -> int:
        """Number of rows that have the columns of the stages `generate` and `reward`."""
        return sum(row.names.issuperset(OWN) for row in self.rows.values())

    @property
    def trained(self) -> int:
        """Number of rows that are trained."""
        return self.ledgers[TRAIN].done

    @property
    def is_generated(self) -> bool:
        """Whether every row has arrived; True once the step is over."""
        return self.is_over or self.arrived == self.expected


class Steps:
    """The steps in progress, by number, each from its begin until it ends or is dropped; their rows, and the leases on
    them.

    Each stage gets every row once, when the row has the columns that the stage needs. A lease with a deadline may be
    given again when it expires. Whatever is repeated or late, each stage finishes a row only once.
    """

    def __init__(self, stages: Iterable[StageRules], store: ColumnStore | None = None) -> None:
        """`store`: where the bodies of columns lie; None: the orchestrator's memory."""
        self.stages = {stage.name: stage for stage in stages}
        self.store = store or MemoryStore()
        self.replica_groups = self.stages[TRAIN].windows.replica_groups
        """Number of replica groups of the trainer, for the steps that begin."""
        self.last: Step | None = None
        """The step that ended last."""
        self._steps: dict[int, Step] = {}
        self._dropped: dict[int, MetronomeError] = {}
        """The step that was dropped last, and why."""
        self._numbers = itertools.count(1)
        self._held: dict[int, Held] = {}
        self._over: dict[int, Held] = {}
        """Leases of steps in progress whose rows are done."""
        self._replaced: dict[int, tuple[Held, str]] = {}
        """Leases that are no longer valid, and why."""

    # steps ----------------------------------------------------------------------------------------

    def begin_run(self, replica_groups: int) -> None:
        """Note the trainer's number of replica groups, for the steps that begin."""
        self.replica_groups = replica_groups

    def begin(self, number: int, expected: int) -> Step:
        """Begin a step of `expected` rows."""
        windows = {name: self._windows_of(name) for name in self.stages}
        step = Step(number, expected, {name: Ledger(expected, found) for name, found in windows.items()})
        self._steps[number] = step
        self._dropped.pop(number, None)
        return step

    def _windows_of(self, stage: str) -> Windows:
        windows = self.stages[stage].windows
        return dataclasses.replace(windows, replica_groups=self.replica_groups) if stage == TRAIN else windows

    def again(self, number: int) -> None:
        """Begin a step again for the trainer: its leases become invalid, and it gets all rows again."""
        self._steps[number].ledgers[TRAIN].begin_again(self._windows_of(TRAIN))
        for lease, held in [*self._held.items(), *self._over.items()]:
            if held.step == number and held.stage == TRAIN:
                self._held.pop(lease, None)
                self._over.pop(lease, None)
                self._replaced[lease] = (held, "the trainer has since restarted the step")

    def end(self, number: int) -> Step | None:
        """Forget the rows and leases of a step that is over. Return the step; None if it is not in progress."""
        step = self._forget(number)
        self.last = step or self.last
        return step

    def drop(self, number: int, why: MetronomeError) -> None:
        """Forget a step whose generation has failed: it may begin again. Whoever asks for it gets `why`."""
        self._forget(number)
        self._dropped = {number: why}

    def _forget(self, number: int) -> Step | None:
        step = self._steps.pop(number, None)
        if step is not None:
            step.is_over = True
            step.rows = {}
        self.store.clear_step(number)
        self._held = {lease: held for lease, held in self._held.items() if held.step != number}
        self._over = {lease: held for lease, held in self._over.items() if held.step != number}
        self._replaced = {lease: one for lease, one in self._replaced.items() if one[0].step != number}
        return step

    def check_dropped(self, number: int | None) -> None:
        """Raise the error for which a step was dropped, if it was."""
        if number in self._dropped:
            raise self._dropped[number]

    def find(self, number: int) -> Step | None:
        """Return a step; None if it has not begun, or is over."""
        return self._steps.get(number)

    def values(self) -> list[Step]:
        """Return the steps in progress, in the order in which they began."""
        return list(self._steps.values())

    @property
    def numbers(self) -> list[int]:
        """The numbers of the steps in progress, in the order in which they began."""
        return list(self._steps)

    @property
    def oldest(self) -> Step | None:
        """The earliest step in progress; None if there is none."""
        return min(self._steps.values(), key=lambda step: step.number, default=None)

    def ledger(self, step: int, stage: str = TRAIN) -> Ledger:
        """The ledger of a stage in a step. Raises KeyError for a step that is not in progress."""
        return self._steps[step].ledgers[stage]

    def rows(self, step: int) -> list[Row]:
        """The rows of a step, in the order in which they were added."""
        return list(self._steps[step].rows.values())

    def find_row(self, step: int, index: int) -> Row | None:
        """Return a row, or None if it has not been added. Raises KeyError for a step that is not in progress."""
        return self._steps[step].rows.get(index)

    # what comes in --------------------------------------------------------------------------------

    def add_row(self, row: Row) -> bool:
        """Add a row. Return False if the same row is already there. Raises ServiceConflict if another row has its
        place, and ValueError if the step has no such place or has not begun."""
        step = self._steps.get(row.step)
        if step is None or not 0 <= row.index < step.expected:
            raise ValueError(f"there is no row {row.index} in step {row.step}")
        if (known := step.rows.get(row.index)) is not None:
            if all(column in known.columns for column in row.columns):
                return False
            raise ServiceConflict(f"step {row.step} already has another group {row.index} (different digest)")
        step.rows[row.index] = replace(row, columns=(), mini_batch=0, window=0)
        self._add_columns(step, row.index, row.columns)
        return True

    def add_columns(self, step: int, index: int, columns: Sequence[Column]) -> bool:
        """Add columns to a row. Return False if all of them are already there. Raises ServiceConflict if a column is
        already there with other bytes."""
        new = self._new_columns(step, index, columns)
        self._add_columns(self._steps[step], index, new)
        return bool(new)

    def _new_columns(self, step: int, index: int, columns: Sequence[Column]) -> list[Column]:
        known = self._steps[step].rows[index]
        for column in columns:
            if column.name in known.names and known.column(column.name).digest != column.digest:
                raise ServiceConflict(
                    f"step {step}, group {index}: the column {column.name!r} already exists with a different digest"
                )
        return [column for column in columns if column.name not in known.names]

    def _add_columns(self, step: Step, index: int, columns: Sequence[Column]) -> None:
        before = step.rows[index]
        row = before.with_columns(columns)
        step.rows[index] = row
        for name, stage in self.stages.items():
            if row.names >= stage.needs and not before.names >= stage.needs:
                self._add_ready(step, name, index)

    def _add_ready(self, step: Step, name: str, index: int) -> None:
        due = [index]
        if self.stages[name].whole:
            waiting = step.held_back.setdefault(name, [])
            waiting.append(index)
            due = waiting if len(waiting) == step.expected else []
        for one in due:
            step.ledgers[name].add_ready(one, step.rows[one].tokens)

    # leases ---------------------------------------------------------------------------------------

    def lease_window(
        self,
        stage: str,
        step: int | None,
        replica_group: int,
        budget: int,
        consumer: str = "",
        now: float = 0.0,
        ahead: bool = False,
    ) -> Held | None:
        """Lease the next window of `step`, or with None of the oldest step that has one. Return None if there is none.

        A window whose lease has expired comes first, with the same rows as before, whatever the budget. `ahead`: the
        consumer asks while it may still work on another window (`Ledger.take_window`). Raises BadInput for a replica
        group that the stage does not have.
        """
        if (again := self._lease_again(stage=stage, step=step, consumer=consumer, ahead=ahead, now=now)) is not None:
            return again
        for one in sorted(self._steps) if step is None else [step]:
            ledger = self._steps[one].ledgers[stage]
            if not 0 <= replica_group < ledger.replica_groups:
                raise BadInput(
                    f"replica group {replica_group} of the stage {stage!r}, which has {ledger.replica_groups} "
                    f"in step {one}"
                )
            at_work = ahead and any((held.stage, held.consumer) == (stage, consumer) for held in self._held.values())
            if indices := ledger.take_window(replica_group, budget, at_work):
                return self._hold(
                    Held(next(self._numbers), stage, step=one, indices=tuple(indices), consumer=consumer, given=now)
                )
        return None

    def _lease_again(self, stage: str, step: int | None, consumer: str, ahead: bool, now: float) -> Held | None:
        """Give an expired lease to this consumer. A consumer that asks ahead does not get its own, which it still works
        on."""
        limit = self.stages[stage].lease_s
        for number, held in self._held.items():
            if held.stage != stage or (step is not None and held.step != step):
                continue
            expired = held.given == EXPIRED
            if ahead and not expired and held.consumer == consumer:
                continue
            if expired or (limit is not None and now - held.given > limit):
                del self._held[number]
                gone = "the ranks that held it are gone; its rows"
                late = gone if expired else f"its rows were not done within {limit:g} s, and"
                why = f"{late} were given to {consumer!r}"
                self._replaced[number] = (held, why)
                number = next(self._numbers)
                more = held.deliveries + 1
                return self._hold(
                    dataclasses.replace(held, number=number, consumer=consumer, given=now, deliveries=more)
                )
        return None

    def _hold(self, held: Held) -> Held:
        self._held[held.number] = held
        return held

    def expire(self, stage: str) -> None:
        """Give what a stage holds to its next consumers at once, because its consumers are gone."""
        for number, held in self._held.items():
            if held.stage == stage:
                self._held[number] = dataclasses.replace(held, given=EXPIRED)

    def held(self, number: int) -> Held:
        """Return the lease with this number. Raises ServiceConflict if it is no longer valid or does not exist."""
        found = self._held.get(number) or self._over.get(number)
        if found is not None:
            return found
        if number in self._replaced:
            held, why = self._replaced[number]
            drop = "drop the gradient of these groups" if held.stage == TRAIN else "drop what was computed"
            raise ServiceConflict(f"lease {number} of step {held.step}: {why}; {drop}")
        raise ServiceConflict(f"there is no lease {number}; the service may have restarted since")

    def check_asked(self, stage: str, columns: Sequence[str]) -> None:
        """Raise BadInput for a column that the stage does not need."""
        needs = self.stages[stage].needs
        if unknown := sorted(set(columns) - needs):
            raise BadInput(f"columns {', '.join(unknown)}: the stage {stage!r} gets {', '.join(sorted(needs))} only")

    def given_rows(self, held: Held, columns: Sequence[str] = ()) -> tuple[Row, ...]:
        """Return the rows of a lease with the columns that their stage needs, or only with those in `columns`."""
        needs = self.stages[held.stage].needs
        step = self._steps[held.step]
        ledger = step.ledgers[held.stage]
        return tuple(
            replace(
                step.rows[index].only(columns or needs),
                mini_batch=ledger.mini_batch(index),
                window=ledger.window(index),
            )
            for index in held.indices
        )

    def batch_scores(self, step: int, reward_weights: Mapping[str, float]) -> BatchScores | None:
        """Return the scores of the step's whole batch; None if the trainer does not need them."""
        if not self.stages[TRAIN].whole:
            return None
        kept = self._steps[step]
        kept.batch = kept.batch or batch_scores(self.rows(step), reward_weights)
        return kept.batch

    def acknowledge_lease(self, number: int) -> tuple[int, ...]:
        """Mark the rows of a lease as done. Return the indices that were not done before.

        Acknowledging twice has no effect. A late acknowledgement still counts unless the rows have been leased again.
        Raises ServiceConflict for a lease that is no longer valid, and for a stage that writes columns.
        """
        held = self.held(number)
        if self.stages[held.stage].gives:
            raise ServiceConflict(
                f"lease {number}: the stage {held.stage!r} completes its rows by writing their columns"
            )
        if number in self._over:
            return ()
        return self._finish(held)

    def write_columns(self, stage: str, number: int, rows: Sequence[Written]) -> bool:
        """Write a stage's columns for the rows of a lease, which ends the lease. Return False if the same columns are
        already there.

        Raises ServiceConflict for a lease that is no longer valid and for a column that already has other bytes, and
        BadInput if rows or columns are not those of the lease and the stage. In these cases nothing is written.
        """
        held = self.held(number)
        gives = self.stages[stage].gives
        if held.stage != stage:
            raise BadInput(f"lease {number} belongs to the stage {held.stage!r}, not to {stage!r}")
        if not gives:
            raise BadInput(f"lease {number}: the stage {stage!r} gives no columns; acknowledge its rows instead")
        indices = [written.index for written in rows]
        if sorted(indices) != sorted(held.indices):
            raise BadInput(f"lease {number}: it has the groups {list(held.indices)}, but {indices} were written")
        for written in rows:
            names = [column.name for column in written.columns]
            if sorted(names) != sorted(gives):
                raise BadInput(
                    f"group {written.index}: the stage {stage!r} gives the columns {', '.join(sorted(gives))}, "
                    f"and {', '.join(sorted(names)) or 'none'} were written"
                )
        new = {written.index: self._new_columns(held.step, written.index, written.columns) for written in rows}
        for index, columns in new.items():
            self._add_columns(self._steps[held.step], index, columns)
        if number in self._held:
            self._finish(held)
        return any(new.values())

    def _finish(self, held: Held) -> tuple[int, ...]:
        self._steps[held.step].ledgers[held.stage].finish_rows(held.indices)
        del self._held[held.number]
        self._over[held.number] = held
        return held.indices

    def waiting(self, stage: str) -> tuple[int, int]:
        """Return (ready rows that are not done, rows that are done) of a stage, over all steps in progress."""
        ledgers = [step.ledgers[stage] for step in self._steps.values()]
        done = sum(ledger.done for ledger in ledgers)
        return sum(ledger.ready for ledger in ledgers) - done, done

    def oldest_lease(self, stage: str) -> Held | None:
        """Return the lease that a stage has held longest; None if there is none. Leases of consumers that are gone
        (`expire`) do not count."""
        held = (one for one in self._held.values() if one.stage == stage and one.given != EXPIRED)
        return min(held, key=lambda one: one.given, default=None)
