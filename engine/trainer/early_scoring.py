"""Log-probabilities under the frozen models of responses whose group is not complete yet (`train.score_early`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from engine.model.layout import Layout
from engine.model.tri_model import TriModel
from engine.trainer.micro_batches import Member, MicroBatch, Packing
from engine.types import Landed

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
        row = self._packing.row([(one.prompt, [one.token_ids]) for one in landed])
        lengths = [len(one.token_ids) for one in landed]
        for name in NAMES:
            (scores,) = self._models.score(name, [row])
            whole = None if scores is None else _of_whole_row(scores, row)
            parts = whole.split(lengths) if whole is not None else [None] * len(landed)
            for one, part in zip(landed, parts, strict=True):
                self._known[name][one.group, one.number] = part

    def scores(self, name: str, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Return each micro-batch's [T] log-probabilities under a frozen model, None before the last pipeline stage.

        They are known from `add` or computed by a forward now; all ranks of the unit do the same of the two. A
        collective of the unit.
        """
        for batch in batches:
            self._score_rest(batch)
        known = [bool(batch.members) and not self._not_scored(batch) for batch in batches]
        missing = [batch.layout for batch, there in zip(batches, known, strict=True) if not there]
        fresh = iter(self._models.score(name, missing))
        return [
            self._joined_scores(name, batch) if there else next(fresh)
            for batch, there in zip(batches, known, strict=True)
        ]

    def _not_scored(self, batch: MicroBatch) -> list[Member]:
        return [member for member in batch.members if (member.group, member.number) not in self._known[NAMES[0]]]

    def _score_rest(self, batch: MicroBatch) -> None:
        """Score the rest of a micro-batch of which some responses were scored early."""
        unknown = self._not_scored(batch)
        if unknown and len(unknown) < len(batch.members):
            self.add(
                [
                    Landed(step=0, group=m.group, number=m.number, prompt=m.prompt, token_ids=m.response.token_ids)
                    for m in unknown
                ]
            )

    def _joined_scores(self, name: str, batch: MicroBatch) -> Tensor | None:
        parts = [self._known[name][member.group, member.number] for member in batch.members]
        whole = [part for part in parts if part is not None]
        return torch.cat(whole)[batch.layout.kept] if whole else None


def _of_whole_row(scores: Tensor, row: Layout) -> Tensor:
    """Return the scores of all response tokens of a row, of which each context-parallel rank has a part."""
    if row.shards == 1:
        return scores
    whole = scores.new_zeros(sum(row.lengths))
    whole[row.kept] = scores
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole
