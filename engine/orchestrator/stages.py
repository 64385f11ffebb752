"""The stages of a recipe that consume rows: `train`, the reference's scorer, and the user's programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from engine.config import BATCH_SCOPE, WINDOWS_TOGETHER, Config
from engine.config.stages import REFERENCE_STAGE
from engine.errors import BadInput, TransferError
from engine.orchestrator.ledger import Windows
from engine.orchestrator.table import RowTable, StageRules
from engine.types import JsonObject
from engine.wire.columns import OWN, REFERENCE, Row, open_values
from engine.wire.messages import TRAIN, Written
from engine.wire.routes import ROUTES


def stages_of(config: Config, lease_s: float | None) -> Iterator[StageRules]:
    """Yield the stages of a recipe. `lease_s`: deadline of the trainer's leases; None for our own trainer, whose leases
    have no deadline.

    A stage that computes the reference cuts the same windows as the trainer, so that both compute the same rows. Leases
    of our own scorers end with their processes (`RowTable.expire`).
    """
    train = config.train
    routes = [ROUTES] if config.algorithm.routing_replay else []
    given = {name: _gives(name, stage.gives) for name, stage in config.stages.items()}
    yield StageRules(
        name=TRAIN,
        needs=frozenset((*OWN, *routes)).union(*given.values()),
        lease_s=lease_s,
        windows=Windows(
            order=train.consume,
            hold=train.mode == "sync",
            replica_groups=config.parallel.replica_groups,
            updates=train.updates,
            least=config.least_window_tokens,
            bubble=config.bubble_tokens,
            together=WINDOWS_TOGETHER if lease_s is None else 1,
        ),
        whole=config.algorithm.advantage in BATCH_SCOPE,
    )
    for name, stage in config.stages.items():
        own = name == REFERENCE_STAGE
        yield StageRules(
            name=name,
            needs=frozenset((*stage.needs, *(routes if own else []))),
            gives=given[name],
            lease_s=None if own else stage.lease_s,
            windows=Windows(
                order=train.consume,
                replica_groups=stage.data if own else 1,
                updates=train.updates if own else 1,
            ),
        )


def scorer_log(logs: Path, name: str) -> Path:
    """Return the log of the ranks of a stage of ours, in the run's log folder."""
    return logs / f"scorer-{name}.log"


def _gives(name: str, gives: list[str]) -> frozenset[str]:
    return frozenset([REFERENCE]) if name == REFERENCE_STAGE else frozenset(gives)


class StageWatch:
    """Tracks which stages have asked for rows, and whether rows wait too long for one. Also checks what stages
    write."""

    def __init__(self, config: Config, table: RowTable, logs: Path) -> None:
        """`logs`: folder with the logs of our own scorers."""
        self._config = config
        self._table = table
        self._logs = logs
        self._asked: dict[str, float] = {}
        """By stage: when it last asked for rows."""
        self._since: dict[str, tuple[float, int]] = {}
        """By stage: since when rows have waited without progress, and how many rows were done at that time."""
        self._written: Counter[str] = Counter()
        """By stage: how often it has written columns."""
        self._restarts: Counter[str] = Counter()

    def find_stage(self, name: str) -> StageRules:
        """Return the stage with this name. Raises BadInput if the recipe has none."""
        if name not in self._table.stages:
            raise BadInput(
                f"there is no stage {name!r} in the recipe, whose stages are {', '.join(sorted(self._table.stages))}. "
                f"To add it, declare [stages.{name}]"
            )
        return self._table.stages[name]

    def note_request(self, name: str, now: float) -> None:
        """Record that the stage has asked for rows."""
        self._asked[name] = now

    def note_written(self, name: str, now: float) -> None:
        """Record that the stage has written columns."""
        self._asked[name] = now
        self._written[name] += 1

    def written(self, name: str) -> int:
        """Return how often the stage has written columns so far."""
        return self._written[name]

    def give_again(self, name: str) -> None:
        """Give what the ranks of a stage held to others, because these ranks are gone. The new ranks may take their
        time before they ask."""
        self._asked.pop(name, None)
        self._restarts[name] += 1
        self._table.expire(name)

    def restarts(self, name: str) -> int:
        """Return how often the ranks of the stage have gone so far. Requests that they sent before must get no rows."""
        return self._restarts[name]

    def hanging(self, name: str, now: float) -> str:
        """Say why living ranks of a stage count as hanging; "" if they don't. They hang if they hold a window longer
        than the stage's `lease_s`, or request nothing for that long while rows wait."""
        limit = self._config.stages[name].lease_s
        held = self._table.oldest_lease(name)
        if held is not None:
            late = f"they have held groups {list(held.indices)} of step {held.step} for more than {limit:g} s"
            return f"{late} (stages.{name}.lease_s)" if now - held.given > limit else ""
        waiting, _ = self._table.waiting(name)
        silent = now - self._asked.get(name, now)
        return (
            (f"{waiting} groups are waiting, and they have asked for none in {silent:.0f} s")
            if waiting and silent > limit
            else ""
        )

    def late_stage(self, now: float) -> str:
        """Say for which stage rows have waited longer than its `wait_s` without progress; "" if for none."""
        for name, stage in self._config.stages.items():
            waiting, done = self._table.waiting(name)
            since, before = self._since.get(name, (now, done))
            if not waiting or done != before:
                since = now
            self._since[name] = (since, done)
            if now - since > stage.wait_s:
                return (
                    f"{waiting} groups of steps {self._table.steps} have waited {stage.wait_s:g} s "
                    f"(stages.{name}.wait_s) for the stage {name!r}: {self._what_it_does(name)}"
                )
        return ""

    def _what_it_does(self, name: str) -> str:
        own = name == REFERENCE_STAGE
        if name in self._asked:
            found = "it makes no progress"
        else:
            found = "its ranks have not asked for rows" if own else "no program has asked for its rows"
        return f"{found}; their log: {scorer_log(self._logs, name)}" if own else found

    def status(self) -> JsonObject:
        """Return by stage the rows that wait for it and the rows that it has finished, over the steps in progress."""
        found: JsonObject = {}
        for name in self._table.stages:
            waiting, done = self._table.waiting(name)
            found[name] = {"waiting": waiting, "done": done}
        return found

    def check_columns(self, step: int, written: Written) -> None:
        """Raise BadInput unless each column is intact and has a finite number for each response or each token of the
        row."""
        head = self._table.find_row(step, written.index)
        if head is None:
            raise BadInput(f"step {step} has no group {written.index}")
        row = head.with_columns(written.columns)
        for column in written.columns:
            _check_values(row, column.name, by_response=column.name in self._config.reward_weights)


def _check_values(row: Row, name: str, by_response: bool) -> None:
    where = f"step {row.step}, group {row.index}: the column {name!r}"
    responses = len(row.lengths)
    tokens = sum(row.lengths)
    try:
        values = open_values(row, name)
    except TransferError as error:
        raise BadInput(str(error)) from None
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise BadInput(f"{where} is malformed: {error}") from None
    allowed = [responses] if by_response else [responses, tokens]
    if values.ndim != 1 or len(values) not in allowed:
        expected = f"[{responses}] (responses)" + ("" if by_response else f" or [{tokens}] (tokens)")
        raise BadInput(f"{where} has the shape {list(values.shape)}, expected {expected}")
    if values.dtype.kind not in "fiub" or not math.isfinite(np.abs(values.astype(np.float64)).sum()):
        raise BadInput(f"{where} has values that are not finite numbers")
