"""A frozen model that fills a column of rows with log-probabilities. [stages.reference] is one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.client.connection import Connection
from engine.config import Config
from engine.errors import ServiceConflict
from engine.model.tri_model import score_layouts, whole_row
from engine.platform import Platform
from engine.run.logs import log_error
from engine.run.trace import Trace
from engine.trainer.ranks.models import make_computation, open_frozen, packing_of
from engine.trainer.ranks.rank_group import RankGroup
from engine.types import Group
from engine.wire.columns import PROMPT, RESPONSES, open_group, pack_values
from engine.wire.messages import EndOfRun, Lease, Taken, Window, Work, WriteColumns, Written
from engine.wire.routes import ROUTES


class Scorer:
    """This rank's part of a frozen model, which leases rows of a stage and writes one column for them.

    The leader of each replica group leases, and every reply goes to all ranks of the replica group. The
    log-probabilities are on the last pipeline stage, whose designated rank writes them.
    """

    def __init__(
        self, config: Config, platform: Platform, ranks: RankGroup, model: Path, stage: str, column: str, trace: Trace
    ) -> None:
        """All ranks construct it together, inside a session of the stage's layout. `model`: a Hugging Face folder with
        the trainer's vocabulary."""
        how = make_computation(config, platform, config.stage_layout(stage))
        self.stage = stage
        self.column = column
        self._columns = (PROMPT, RESPONSES, *([ROUTES] if config.algorithm.routing_replay else []))
        self._budget = config.stages[stage].budget or config.window_tokens
        self._temperature = config.rollout.temperature
        self._ranks = ranks
        self._trace = trace
        self._model, self._shape = open_frozen(model, how)
        self._packing = packing_of(config, how, ranks)

    def serve(self, plane: Connection) -> None:
        """Score rows until the run is over. A collective of the replica group."""
        try:
            while not isinstance(work := self._ranks.from_leader(partial(self._lease, plane)), EndOfRun):
                if isinstance(work, Window):
                    self._answer(plane, work)
                else:  # a sign of life: ask again
                    self._trace.flush()
        finally:
            self._trace.flush()

    def _lease(self, plane: Connection) -> Work:
        return plane.ask(
            Lease(
                stage=self.stage,
                replica_group=self._ranks.replica_group,
                budget=self._budget,
                columns=self._columns,
                consumer=self._trace.role,
            )
        )

    def _answer(self, plane: Connection, window: Window) -> None:
        """Score a window and write its column. If its rows have been leased again, the result is dropped."""
        started = time.time()
        groups = list(map(open_group, window.rows))
        found = self.score(groups)
        scored = time.time()
        try:
            self._ranks.from_last(partial(self._write, plane, window, found))
        except ServiceConflict as conflict:
            log_error(f"{self._trace.role}: {conflict}")
        tokens = sum(row.tokens for row in window.rows)
        self._trace.add_span(
            "score", started, scored, step=window.step, groups=[group.index for group in groups], tokens=tokens
        )

    def _write(self, plane: Connection, window: Window, found: Mapping[int, NDArray[np.float32]]) -> Taken:
        rows = tuple(Written(row.index, (pack_values(self.column, found[row.index]),)) for row in window.rows)
        return plane.ask(WriteColumns(stage=self.stage, lease=window.lease, rows=rows))

    def score(self, groups: Sequence[Group]) -> dict[int, NDArray[np.float32]]:
        """Return the log-probabilities of all response tokens of each group, by the group's index: [sum of lengths],
        with the responses concatenated in order. The packed rows are those that the trainer computes for the same
        window.

        {} on all but the last pipeline stage. A collective of the replica group.
        """
        rows = self._packing.rows(groups)
        found = score_layouts(self._model, [row.layout for row in rows], self._temperature)
        pieces: dict[tuple[int, int], Tensor] = {}
        for row, scores in zip(rows, found, strict=True):
            if scores is not None:
                lengths = [len(response.token_ids) for response in row.responses]
                parts = whole_row(scores, row.layout).cpu().split(lengths)
                pieces |= {
                    (group.index, number): part for (group, number), part in zip(row.members, parts, strict=True)
                }
        return {group.index: _laid_end_to_end(group, pieces) for group in groups} if pieces else {}


def _laid_end_to_end(group: Group, pieces: Mapping[tuple[int, int], Tensor]) -> NDArray[np.float32]:
    own = (pieces[group.index, number] for number in range(len(group.responses)))
    return torch.cat(list(chain([torch.zeros(0)], own))).to(torch.float32).numpy()
