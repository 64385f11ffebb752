"""Old and reference log-probabilities of responses that landed before their group was
complete (`train.score_early`)."""

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
    """Scores of one step by (group, response); what was not scored early is scored with its micro-batch."""

    def __init__(self, models: TriModel, packing: Packing) -> None:
        self._models = models
        self._packing = packing
        self._known: dict[str, dict[tuple[int, int], Tensor | None]] = {name: {} for name in NAMES}

    def clear(self) -> None:
        """Forget everything: another step, other weights."""
        for known in self._known.values():
            known.clear()

    def add(self, landed: Sequence[Landed]) -> None:
        """Score landed responses in one forward under each frozen model. A collective of the unit."""
        row = self._packing.row([(one.prompt, [one.token_ids]) for one in landed])
        lengths = [len(one.token_ids) for one in landed]
        for name in NAMES:
            (scores,) = self._models.score(name, [row])
            whole = None if scores is None else _whole(scores, row)
            parts = whole.split(lengths) if whole is not None else [None] * len(landed)
            for one, part in zip(landed, parts, strict=True):
                self._known[name][one.group, one.number] = part

    def scores(self, name: str, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Each micro-batch's [T] log-probabilities under a frozen model, from what is known or by a forward now.

        Which of the two is the same on every rank of the unit; None on all but the last pipeline stage.
        """
        for batch in batches:
            self._fill_gaps(batch)
        known = [bool(batch.members) and not self._unknown(batch) for batch in batches]
        missing = [batch.layout for batch, there in zip(batches, known, strict=True) if not there]
        fresh = iter(self._models.score(name, missing))
        return [
            self._joined(name, batch) if there else next(fresh) for batch, there in zip(batches, known, strict=True)
        ]

    def _unknown(self, batch: MicroBatch) -> list[Member]:
        return [member for member in batch.members if (member.group, member.number) not in self._known[NAMES[0]]]

    def _fill_gaps(self, batch: MicroBatch) -> None:
        """Where some of a micro-batch's responses were scored early, score just the others."""
        unknown = self._unknown(batch)
        if unknown and len(unknown) < len(batch.members):
            self.add(
                [
                    Landed(step=0, group=m.group, number=m.number, prompt=m.prompt, token_ids=m.response.token_ids)
                    for m in unknown
                ]
            )

    def _joined(self, name: str, batch: MicroBatch) -> Tensor | None:
        parts = [self._known[name][member.group, member.number] for member in batch.members]
        whole = [part for part in parts if part is not None]
        return torch.cat(whole)[batch.layout.kept] if whole else None


def _whole(scores: Tensor, row: Layout) -> Tensor:
    """The scores of all of a row's response tokens, where context parallelism has each rank score a part of them."""
    if row.shards == 1:
        return scores
    whole = scores.new_zeros(sum(row.lengths))
    whole[row.kept] = scores
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole
