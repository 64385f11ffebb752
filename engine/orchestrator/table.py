"""The table of rows and columns, and what each stage has taken of it (AsyncFlow §3.2 and §3.3).

Pure bookkeeping: no I/O, and no clock of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed

from msgspec.structs import replace

from engine.errors import BadInput, ServiceConflict
from engine.orchestrator.ledger import Ledger, Windows
from engine.types import BatchScores
from engine.wire.columns import OWN, Column, Row, batch_scores
from engine.wire.messages import TRAIN, Written

EXPIRED = float("-inf")
"""`Held.given` of a lease whose consumer is gone."""


@dataclass(frozen=True)
class StageRules:
    """A consumer of rows, which may give them columns."""

    name: str
    needs: frozenset[str]
    """Columns that a row must have to be ready for the stage."""
    gives: frozenset[str] = frozenset()
    """Columns that the stage writes; a row is done for it once all are there. Without any, rows are acknowledged."""
    lease_s: float | None = None
    """Seconds after which rows may be given again; None: never within the step."""
    windows: Windows = Windows()
    whole: bool = False
    """Whether no row is ready before every row of the step has the needed columns (advantages of batch scope)."""


@dataclass(frozen=True)
class Held:
    """A window that is leased, and whose rows the stage is not through with."""

    number: int
    stage: str
    step: int
    indices: tuple[int, ...]
    consumer: str
    given: float
    """When it was given, by the caller's clock (`now` of `RowTable.lease`)."""
    deliveries: int = 1
    """How often the rows were given, this time included."""


@dataclass
class _Step:
    """The rows of one step."""

    expected: int
    ledgers: dict[str, Ledger]
    rows: dict[int, Row] = field(default_factory=dict)
    held_back: dict[str, list[int]] = field(default_factory=dict)
    """By stage that needs whole steps: indices that have the needed columns, until all have them."""
    batch: BatchScores | None = None
    """The scores of the whole batch, once they were asked for."""


class RowTable:
    """Rows of the steps under way, with a ledger for each stage and step.

    Every row that is put is given to each stage once, when the columns that the stage needs are there; a lease with a
    deadline may be given again after it. Whatever repeats or comes late, a row is done for a stage once.
    """

    def __init__(self, stages: Iterable[StageRules]) -> None:
        self.stages = {stage.name: stage for stage in stages}
        self._steps: dict[int, _Step] = {}
        self._numbers = itertools.count(1)
        self._held: dict[int, Held] = {}
        self._over: dict[int, Held] = {}
        """Leases of steps under way whose rows are done."""
        self._replaced: dict[int, tuple[Held, str]] = {}
        """Leases that count no more, and why."""

    # steps ----------------------------------------------------------------------------------------

    def begin(self, step: int, expected: int, units: int | None = None) -> None:
        """Begin a step of `expected` rows. `units`: those of the trainer; None: those of the stage."""
        ledgers = {
            name: Ledger(expected, self._train_windows(units) if name == TRAIN else stage.windows)
            for name, stage in self.stages.items()
        }
        self._steps[step] = _Step(expected, ledgers)

    def _train_windows(self, units: int | None) -> Windows:
        windows = self.stages[TRAIN].windows
        return windows if units is None else changed(windows, units=units)

    def begin_again(self, step: int, units: int | None = None) -> None:
        """The trainer begins a step again: no lease of its counts, and all rows are given to it again. `units`: as of
        `begin`."""
        self._steps[step].ledgers[TRAIN].begin_again(self._train_windows(units))
        for number, held in [*self._held.items(), *self._over.items()]:
            if held.step == step and held.stage == TRAIN:
                self._held.pop(number, None)
                self._over.pop(number, None)
                self._replaced[number] = (held, "the trainer has begun the step again since")

    def forget(self, step: int) -> None:
        """A step is over: forget its rows and leases."""
        self._steps.pop(step, None)
        self._held = {number: held for number, held in self._held.items() if held.step != step}
        self._over = {number: held for number, held in self._over.items() if held.step != step}
        self._replaced = {number: one for number, one in self._replaced.items() if one[0].step != step}

    @property
    def steps(self) -> list[int]:
        """The steps under way, in the order in which they began."""
        return list(self._steps)

    def ledger(self, step: int, stage: str = TRAIN) -> Ledger:
        """The ledger of a stage in a step. Raises KeyError for a step that is not under way."""
        return self._steps[step].ledgers[stage]

    def arrived(self, step: int) -> int:
        """Number of rows that have come in with the columns of the stages `generate` and `reward`."""
        return sum(row.names.issuperset(OWN) for row in self._steps[step].rows.values())

    def is_generated(self, step: int) -> bool:
        """Whether every row has come in; also of a step that is over."""
        return step not in self._steps or self.arrived(step) == self._steps[step].expected

    def rows(self, step: int) -> list[Row]:
        """The rows of a step, in the order in which they were put."""
        return list(self._steps[step].rows.values())

    def find(self, step: int, index: int) -> Row | None:
        """A row; None if it is not there. Raises KeyError for a step that is not under way."""
        return self._steps[step].rows.get(index)

    # what comes in --------------------------------------------------------------------------------

    def put(self, row: Row) -> bool:
        """Add a row. Return False if the same is there. Raises ServiceConflict if another one has its place, ValueError
        if the step has no such place or was not begun."""
        step = self._steps.get(row.step)
        if step is None or not 0 <= row.index < step.expected:
            raise ValueError(f"there is no row {row.index} in step {row.step}")
        if (known := step.rows.get(row.index)) is not None:
            if all(column in known.columns for column in row.columns):
                return False
            raise ServiceConflict(f"step {row.step} has another group {row.index} already (another digest)")
        step.rows[row.index] = replace(row, columns=(), mini_batch=0)
        self._add_columns(step, row.index, row.columns)
        return True

    def write(self, step: int, index: int, columns: Sequence[Column]) -> bool:
        """Give a row further columns. Return False if the same are there. Raises ServiceConflict if a column has other
        bytes already."""
        new = self._new_columns(step, index, columns)
        self._add_columns(self._steps[step], index, new)
        return bool(new)

    def _new_columns(self, step: int, index: int, columns: Sequence[Column]) -> list[Column]:
        known = self._steps[step].rows[index]
        for column in columns:
            if column.name in known.names and known.column(column.name).digest != column.digest:
                raise ServiceConflict(
                    f"step {step}, group {index}: the column {column.name!r} is there already (another digest)"
                )
        return [column for column in columns if column.name not in known.names]

    def _add_columns(self, step: _Step, index: int, columns: Sequence[Column]) -> None:
        before = step.rows[index]
        row = before.with_columns(columns)
        step.rows[index] = row
        for name, stage in self.stages.items():
            if row.names >= stage.needs and not before.names >= stage.needs:
                self._add_ready(step, name, index)

    def _add_ready(self, step: _Step, name: str, index: int) -> None:
        due = [index]
        if self.stages[name].whole:
            waiting = step.held_back.setdefault(name, [])
            waiting.append(index)
            due = waiting if len(waiting) == step.expected else []
        for one in due:
            step.ledgers[name].add_ready(one, step.rows[one].tokens)

    # leases ---------------------------------------------------------------------------------------

    def lease(
        self,
        stage: str,
        step: int | None,
        unit: int,
        budget: int,
        consumer: str = "",
        now: float = 0.0,
        ahead: bool = False,
    ) -> Held | None:
        """Lease the next window of a step, or of the oldest step that has one; None if there is none.

        A window whose last lease is over its deadline comes first, with the rows of the first time, whatever the
        budget. `ahead`: the consumer asks while it may still be at work on another window (`Ledger.take`). Raises
        BadInput for a unit that the stage does not have.
        """
        if (again := self._lease_again(stage=stage, step=step, consumer=consumer, ahead=ahead, now=now)) is not None:
            return again
        for one in sorted(self._steps) if step is None else [step]:
            ledger = self._steps[one].ledgers[stage]
            if not 0 <= unit < ledger.units:
                raise BadInput(f"unit {unit} of the stage {stage!r}, which has {ledger.units} in step {one}")
            at_work = ahead and any((held.stage, held.consumer) == (stage, consumer) for held in self._held.values())
            if indices := ledger.take(unit, budget, at_work):
                return self._hold(
                    Held(next(self._numbers), stage, step=one, indices=tuple(indices), consumer=consumer, given=now)
                )
        return None

    def _lease_again(self, stage: str, step: int | None, consumer: str, ahead: bool, now: float) -> Held | None:
        """A lease whose deadline is over, given to this consumer. One that asks ahead still has its own at work."""
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
                return self._hold(changed(held, number=number, consumer=consumer, given=now, deliveries=more))
        return None

    def _hold(self, held: Held) -> Held:
        self._held[held.number] = held
        return held

    def expire(self, stage: str) -> None:
        """The consumers of a stage are gone: what they hold is given to the next ones at once."""
        for number, held in self._held.items():
            if held.stage == stage:
                self._held[number] = changed(held, given=EXPIRED)

    def is_held(self, number: int) -> bool:
        """Whether a lease counts and its rows are not done."""
        return number in self._held

    def held(self, number: int) -> Held:
        """The lease of this number. Raises ServiceConflict if it does not count, or if there is none."""
        found = self._held.get(number) or self._over.get(number)
        if found is not None:
            return found
        if number in self._replaced:
            held, why = self._replaced[number]
            drop = "drop the gradient of these groups" if held.stage == TRAIN else "drop what was computed"
            raise ServiceConflict(f"lease {number} of step {held.step}: {why}; {drop}")
        raise ServiceConflict(f"there is no lease {number}; the service may have been started again since")

    def check_asked(self, stage: str, columns: Sequence[str]) -> None:
        """Raise BadInput for a column that the stage does not need."""
        needs = self.stages[stage].needs
        if unknown := sorted(set(columns) - needs):
            raise BadInput(f"columns {', '.join(unknown)}: the stage {stage!r} gets {', '.join(sorted(needs))} only")

    def given_rows(self, held: Held, columns: Sequence[str] = ()) -> tuple[Row, ...]:
        """The rows of a lease with the columns that their stage needs, or with `columns` of these."""
        needs = self.stages[held.stage].needs
        step = self._steps[held.step]
        ledger = step.ledgers[held.stage]
        return tuple(
            replace(step.rows[index].only(columns or needs), mini_batch=ledger.mini_batch(index))
            for index in held.indices
        )

    def batch_scores(self, step: int, reward_weights: Mapping[str, float]) -> BatchScores | None:
        """The scores of the step's whole batch, where the trainer needs them; None elsewhere."""
        if not self.stages[TRAIN].whole:
            return None
        kept = self._steps[step]
        kept.batch = kept.batch or batch_scores(self.rows(step), reward_weights)
        return kept.batch

    def acknowledge(self, number: int) -> tuple[int, ...]:
        """The stage is through with the rows of a lease. Return the indices that were not done before: acknowledging
        twice has no effect, and a late acknowledgement counts unless the rows were given again.

        Raises ServiceConflict for a lease that does not count, and for one of a stage that writes columns.
        """
        held = self.held(number)
        if self.stages[held.stage].gives:
            raise ServiceConflict(f"lease {number}: the stage {held.stage!r} is through with rows when it has written")
        if number in self._over:
            return ()
        return self._finish(held)

    def write_columns(self, stage: str, number: int, rows: Sequence[Written]) -> bool:
        """A stage gives rows of a lease its columns; the lease ends when all are written. Return False if the same are
        there.

        Raises ServiceConflict for a lease that does not count and for a column that has other bytes, BadInput for rows
        and columns that are not those of lease and stage. Then nothing is written.
        """
        held = self.held(number)
        gives = self.stages[stage].gives
        if held.stage != stage:
            raise BadInput(f"lease {number} is one of the stage {held.stage!r}, not of {stage!r}")
        if not gives:
            raise BadInput(f"lease {number}: the stage {stage!r} gives no columns; its rows are acknowledged")
        indices = [written.index for written in rows]
        if sorted(indices) != sorted(held.indices):
            raise BadInput(f"lease {number}: it has the groups {list(held.indices)}, and {indices} were written")
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
        self._steps[held.step].ledgers[held.stage].finish(held.indices)
        del self._held[held.number]
        self._over[held.number] = held
        return held.indices

    def waiting(self, stage: str) -> tuple[int, int]:
        """(rows that are ready for a stage and not done, rows done) over all steps under way."""
        ledgers = [step.ledgers[stage] for step in self._steps.values()]
        done = sum(ledger.done for ledger in ledgers)
        return sum(ledger.ready for ledger in ledgers) - done, done

    def oldest_lease(self, stage: str) -> Held | None:
        """The lease of a stage that is held for longest; None without one. Leases of consumers that are gone do not
        count (`expire`)."""
        held = (one for one in self._held.values() if one.stage == stage and one.given != EXPIRED)
        return min(held, key=lambda one: one.given, default=None)
