"""Log-probabilities under the frozen models of responses whose group is not complete yet (`train.score_early`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from torch import Tensor

from engine.model.tri_model import TriModel, whole_row
from engine.ranks.packing import Packing
from engine.trainer.micro_batches import MicroBatch
from engine.types import Group, Landed

NAMES = ("old", "reference")


class EarlyScores:
    """The scores of one step's responses, by (group, response). Others are scored with their micro-batch."""

    def __init__(self, models: TriModel, packing: Packing) -> None:
        self._models = models
        self._packing = packing
        self._known: dict[str, dict[tuple[int, int], Tensor | None]] = {name: {} for name in NAMES}

    def clear(self) -> None:
        """Forget all scores: another step has other weights."""
        for known in self._known.values():
            known.clear()

    def add(self, landed: Sequence[Landed]) -> None:
        """Score landed responses in one forward under each frozen model. A collective of the unit."""
        row = self._packing.layout([(one.prompt, [one.token_ids]) for one in landed])
        lengths = [len(one.token_ids) for one in landed]
        for name in NAMES:
            (scores,) = self._models.score(name, [row])
            whole = None if scores is None else whole_row(scores, row)
            parts = whole.split(lengths) if whole is not None else [None] * len(landed)
            for one, part in zip(landed, parts, strict=True):
                self._known[name][one.group, one.number] = part

    def scores(self, name: str, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Return each micro-batch's [T] log-probabilities under a frozen model, None before the last pipeline stage.

        They are known from `add` or computed by a forward now; all ranks of the unit do the same of the two. Those of
        the reference are the window's column where it has one. A collective of the unit.
        """
        if name == "reference" and all(batch.reference is not None for batch in batches):
            last = parallel_state.is_pipeline_last_stage()
            return [batch.reference if last else None for batch in batches]
        for batch in batches:
            self._score_rest(batch)
        known = [bool(batch.members) and not self._not_scored(batch) for batch in batches]
        missing = [batch.layout for batch, there in zip(batches, known, strict=True) if not there]
        fresh = iter(self._models.score(name, missing))
        return [
            self._joined_scores(name, batch) if there else next(fresh)
            for batch, there in zip(batches, known, strict=True)
        ]

    def _not_scored(self, batch: MicroBatch) -> list[tuple[Group, int]]:
        known = self._known[NAMES[0]]
        return [(group, number) for group, number in batch.members if (group.index, number) not in known]

    def _score_rest(self, batch: MicroBatch) -> None:
        """Score the rest of a micro-batch of which some responses were scored early."""
        unknown = self._not_scored(batch)
        if unknown and len(unknown) < len(batch.members):
            self.add(
                [
                    Landed(
                        step=group.step,
                        group=group.index,
                        number=number,
                        prompt=group.prompt.token_ids,
                        token_ids=group.responses[number].token_ids,
                    )
                    for group, number in unknown
                ]
            )

    def _joined_scores(self, name: str, batch: MicroBatch) -> Tensor | None:
        parts = [self._known[name][group.index, number] for group, number in batch.members]
        whole = [part for part in parts if part is not None]
        return torch.cat(whole)[batch.layout.kept] if whole else None
