"""Windows that are scored when they arrive and trained once the step's batch is there, for losses of batch scope.

The result is exact in every layout and for all micro-batches: the policy does not change within a step, so a
forward-only pass over a window gives the log-probabilities of its later backward pass. This costs that pass (a third of
a forward and backward) and two numbers a token over the CPU channel. The pass runs while later groups are generated.
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
    """A rank's part of the batch's trained tokens, as fp32 buffers."""

    log_ratios: bytes
    advantages: bytes


class HeldWindows:
    """One rank's held windows of a step."""

    def __init__(self, loss: PolicyLoss, limits: BatchLossSettings, ranks: RankGroup) -> None:
        self._loss = loss
        self._limits = limits
        self._ranks = ranks
        self._windows: list[list[Scored]] = []
        self._log_ratios: list[Tensor] = []
        self._advantages: list[Tensor] = []

    def clear(self) -> None:
        """Forget the windows: another step begins."""
        self._windows = []
        self._log_ratios = []
        self._advantages = []

    def add(self, scored: Sequence[Scored], log_ratios: Sequence[Tensor | None]) -> None:
        """Hold a window. `log_ratios`: [T] of each micro-batch, known on the last pipeline stage and None elsewhere."""
        self._windows.append(list(scored))
        if not self._ranks.judges:
            return  # the rank with `judges` holds these tokens
        for (batch, _, _), logs in zip(scored, log_ratios, strict=True):
            assert logs is not None
            trained = batch.weights > 0
            self._log_ratios.append(logs[trained].float().cpu())
            self._advantages.append(batch.advantages[trained].float().cpu())

    def take(self) -> tuple[list[list[Scored]], tuple[float, ...]]:
        """Return this rank's windows, and the loss's statistics over those of all ranks. A collective of all ranks."""
        assert self._loss.statistics is not None
        held = self._ranks.gather(HeldTokens(_fp32_bytes(self._log_ratios), _fp32_bytes(self._advantages)))
        whole = BatchTokens(
            torch.cat([_fp32_tensor(part.log_ratios) for part in held]),
            torch.cat([_fp32_tensor(part.advantages) for part in held]),
        )
        windows = self._windows
        self.clear()
        return windows, self._loss.statistics(whole, self._limits)


def hold_windows(
    spec: str, loss: PolicyLoss, limits: BatchLossSettings, ranks: RankGroup, mode: str
) -> HeldWindows | None:
    """Return a place to hold windows for a loss of batch scope, None for any other loss.

    Raises BadInput for a loss of batch scope in `periodic`. The config refuses built-in ones; the scope of a user's own
    is known only once its file is loaded.
    """
    if loss.scope == "group":
        return None
    if mode == "periodic":
        raise BadInput(
            f'algorithm.loss = "{spec}" takes its statistics over the whole batch, so no group can be trained before '
            'the last one is there: it needs another train.mode than "periodic"'
        )
    return HeldWindows(loss, limits, ranks)


def _fp32_bytes(parts: Sequence[Tensor]) -> bytes:
    return torch.cat([torch.zeros(0), *parts]).numpy().tobytes()


def _fp32_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.zeros(0)
