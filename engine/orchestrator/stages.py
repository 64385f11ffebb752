"""The stages of a recipe that consume rows: `train`, the reference's scorer, and the user's programs. Also checks what
they write."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path

import msgspec
import numpy as np

from engine.config import BATCH_SCOPE, WINDOWS_TOGETHER, Config
from engine.config.stages import REFERENCE_STAGE
from engine.errors import BadInput, TransferError
from engine.orchestrator.ledger import Windows
from engine.orchestrator.steps import StageRules
from engine.reward.scorer import LARGEST_SCORE
from engine.wire.columns import OWN, REFERENCE, Row, open_values
from engine.wire.messages import TRAIN, Written
from engine.wire.routes import ROUTES


def stages_of(config: Config, lease_s: float | None) -> Iterator[StageRules]:
    """Yield the stages of a recipe. `lease_s`: deadline of the trainer's leases; None for our own trainer, whose leases
    have no deadline.

    A stage that computes the reference cuts the same windows as the trainer, so that both compute the same rows. Leases
    of our own scorers end with their processes (`Steps.expire`).
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


def check_columns(head: Row, written: Written, rewards: Container[str]) -> None:
    """Raise BadInput unless each column that a stage writes to a row is intact and has a number that is finite in fp32
    for each response or each token of the row. `rewards`: the columns that add to the reward, which has one for each
    response, of at most LARGEST_SCORE."""
    row = head.with_columns(written.columns)
    for column in written.columns:
        _check_values(row, column.name, by_response=column.name in rewards)


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
    largest = LARGEST_SCORE if by_response else float(np.finfo(np.float32).max)
    if values.dtype.kind not in "fiub" or not (np.abs(values.astype(np.float64)) <= largest).all():
        raise BadInput(f"{where} has values that are not finite numbers from {-largest:g} to {largest:g}")
