"""A step's windows that are scored as they come and trained once all are there, for losses of batch scope.

Exact in every layout and whatever the micro-batches: the policy does not move within a step, so its log-probabilities
in a forward-only pass over a window are those of the backward pass to come. Costs that pass (a third of a forward and
backward) and two numbers a token over the CPU channel. The forward runs while later groups are still generated.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from engine.algorithm.batch_statistics import BatchLossSettings, BatchTokens
from engine.algorithm.losses import PolicyLoss
from engine.errors import BadInput
from engine.trainer.micro_batches import MicroBatch
from engine.trainer.rank_group import RankGroup

Scored = tuple[MicroBatch, Tensor | None, Tensor | None]
"""A micro-batch with its log-probabilities under old policy and reference."""


class HeldTokens(msgspec.Struct):
    """What a rank holds of the batch's trained tokens, as fp32 buffers."""

    log_ratios: bytes
    advantages: bytes


class HeldWindows:
    """What one rank holds of a step."""

    def __init__(self, loss: PolicyLoss, limits: BatchLossSettings, ranks: RankGroup) -> None:
        self._loss = loss
        self._limits = limits
        self._ranks = ranks
        self._windows: list[list[Scored]] = []
        self._log_ratios: list[Tensor] = []
        self._advantages: list[Tensor] = []

    def clear(self) -> None:
        """Forget everything: another step."""
        self._windows = []
        self._log_ratios = []
        self._advantages = []

    def add(self, scored: Sequence[Scored], log_ratios: Sequence[Tensor | None]) -> None:
        """Hold a window; log_ratios [T] of each micro-batch on ranks that know them (the last pipeline stage)."""
        self._windows.append(list(scored))
        if not self._ranks.judges:
            return  # another rank tells the same
        for (batch, _, _), logs in zip(scored, log_ratios, strict=True):
            assert logs is not None
            trained = batch.weights > 0
            self._log_ratios.append(logs[trained].float().cpu())
            self._advantages.append(batch.advantages[trained].float().cpu())

    def take(self) -> tuple[list[list[Scored]], tuple[float, ...]]:
        """All windows held, and the loss's statistics over those of all ranks. A collective of all ranks."""
        assert self._loss.statistics is not None
        held = self._ranks.gather(HeldTokens(_bytes(self._log_ratios), _bytes(self._advantages)))
        whole = BatchTokens(
            torch.cat([_tensor(part.log_ratios) for part in held]),
            torch.cat([_tensor(part.advantages) for part in held]),
        )
        windows = self._windows
        self.clear()
        return windows, self._loss.statistics(whole, self._limits)


def hold_windows(
    spec: str, loss: PolicyLoss, limits: BatchLossSettings, ranks: RankGroup, mode: str
) -> HeldWindows | None:
    """A place to hold windows for a loss of batch scope, None for others. Raises BadInput for one in `periodic` (the
    config refuses ours by name; of a user's own only the file knows)."""
    if loss.scope == "group":
        return None
    if mode == "periodic":
        raise BadInput(
            f'algorithm.loss = "{spec}" takes its statistics over the whole batch, so no group can be trained before '
            'the last one is there: it needs another train.mode than "periodic"'
        )
    return HeldWindows(loss, limits, ranks)


def _bytes(parts: Sequence[Tensor]) -> bytes:
    return torch.cat([torch.zeros(0), *parts]).numpy().tobytes()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.zeros(0)
