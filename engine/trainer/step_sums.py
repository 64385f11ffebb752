"""What one rank adds up while it trains a step, and the counts that the denominators of its updates need."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from engine.algorithm.losses import Loss
from engine.algorithm.mismatch import mismatch_figures
from engine.errors import MetronomeError
from engine.trainer.group_advantages import GroupAdvantages
from engine.trainer.micro_batches import MicroBatch
from engine.trainer.ranks.rank_group import RankGroup
from engine.trainer.step_metrics import Advantages, LossCounts, StepMetrics
from engine.types import Group


class StepSums:
    """One rank's sums over a step."""

    def __init__(self, ranks: RankGroup, group_advantages: GroupAdvantages, updates: int) -> None:
        """`updates`: number of updates in a step."""
        self.metrics = StepMetrics(losses=[0.0] * updates)
        self.advantages: Advantages = {}
        self.denominators: list[float] = []
        """Denominators of the updates already reduced."""
        self._ranks = ranks
        self._group_advantages = group_advantages
        self._counts = [LossCounts() for _ in range(updates)]
        self._unsound: set[str] = set()
        """Ids of prompts whose micro-batches have a figure that is not finite."""
        self._on_device: list[Tensor] = []
        """Flat tensors of the current window, which `end_window` copies to the host."""
        self._when_copied: list[Callable[[Tensor], None]] = []
        """For each of these tensors, the function that receives its host copy."""

    @property
    def update(self) -> int:
        """Number of the current update."""
        return len(self.denominators)

    def add_window(self, window: Sequence[Group]) -> None:
        """Count the groups of a window. Does nothing on ranks that do not lead their replica group."""
        if not self._ranks.leader:
            return
        for group in window:
            tokens = self._group_advantages.count_tokens(group)
            unequal = self._group_advantages.unequal(group)
            self.metrics.add_group(group, tokens, unequal)
            self._counts[group.mini_batch].add_group(tokens, unequal)

    def compare_logprobs(self, batch: MicroBatch, logprobs: Tensor) -> None:
        """Schedule the comparison of the trainer's [T] log-probabilities with the instances' for the end of the
        window. Tokens that were not sampled are left out."""
        self._on_device.append(torch.cat([logprobs, batch.rollout, batch.sampled.to(logprobs.dtype)]))
        self._when_copied.append(partial(self._add_comparison, batch))

    def add_loss(self, batch: MicroBatch, loss: Loss) -> None:
        """Schedule a micro-batch's loss to be added to the current update at the end of the window."""
        if not self._ranks.judges:
            return
        figures = (loss.total.detach(), loss.kl, loss.entropy, loss.ratio_max, loss.clipped, loss.dropped)
        self._on_device.append(torch.stack(figures))
        self._when_copied.append(partial(self._add_figures, batch, self.update))

    def end_window(self) -> None:
        """Add the figures that the window's micro-batches left on the device to the metrics. All are copied to the host
        at once, because each copy waits for all earlier work on the device."""
        if not self._on_device:
            return
        sizes = [piece.numel() for piece in self._on_device]
        pieces = torch.cat(self._on_device).cpu().split(sizes)
        for add, piece in zip(self._when_copied, pieces, strict=True):
            add(piece)
        self._on_device.clear()
        self._when_copied.clear()

    def _add_comparison(self, batch: MicroBatch, compared: Tensor) -> None:
        """`compared`: [3·T] log-probabilities, first the trainer's, then the instances', and whether the token was
        sampled."""
        ours, theirs, sampled = compared.chunk(3)
        kept = sampled > 0
        gap, divergence = mismatch_figures(ours[kept], theirs[kept])
        self.metrics.worst_gap(gap)
        if not self._ranks.judges:
            return
        self._note_unsound(batch, (gap, divergence))
        self.metrics.mismatch_kl += divergence
        self.metrics.scored_tokens += int(kept.sum())

    def _add_figures(self, batch: MicroBatch, update: int, figures: Tensor) -> None:
        total, kl, entropy, ratio_max, clipped, dropped = map(float, figures.tolist())
        metrics = self.metrics
        metrics.losses[update] += total
        metrics.kl += kl
        metrics.entropy += entropy
        metrics.clipped += clipped
        metrics.dropped += dropped
        metrics.worst_ratio(ratio_max)
        for (group, number), advantage in zip(batch.members, batch.of_members, strict=True):
            self.advantages.setdefault(group.index, {})[number] = advantage
        self._note_unsound(batch, (total, kl, entropy, ratio_max))

    def _note_unsound(self, batch: MicroBatch, figures: Sequence[float]) -> None:
        if not all(map(math.isfinite, figures)):
            self._unsound |= {group.prompt.id for group, _ in batch.members}

    def counts(self) -> LossCounts:
        """Return the counts of the current update over all ranks. Collective over all ranks.

        Raises MetronomeError, which names the prompts, if a figure was not finite on any rank.
        """
        mine = self._counts[self.update]
        mine.unsound = sorted(self._unsound)
        found = self._ranks.gather(mine)
        if unsound := sorted({prompt for counts in found for prompt in counts.unsound}):
            raise MetronomeError(
                f"loss, KL, entropy or a ratio is not finite in the micro-batches of prompts {unsound}; the update was "
                "not made (weights are unchanged)"
            )
        return LossCounts(
            tokens=sum(counts.tokens for counts in found),
            groups=sum(counts.groups for counts in found),
            unequal=sum(counts.unequal for counts in found),
        )


def sum_over_context(sums: Tensor) -> Tensor:
    """Turn sums over this context rank's tokens into sums over the tokens of the whole row."""
    if sums.numel() and parallel_state.get_context_parallel_world_size() > 1:  # these ranks hold equally many sums
        dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
    return sums
