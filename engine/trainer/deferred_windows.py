"""Windows that a replica group holds until the update that trains them: windows of later mini-batches
(`train.updates`), and all windows if the loss is of batch scope.

A loss of batch scope is exact in every layout and for all micro-batches. The policy does not change within an update,
so a forward-only pass over a window gives the same log-probabilities as its later backward pass. This costs that pass
(a third of a forward and backward) and two numbers per token over the CPU channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from engine.algorithm.batch_statistics import BatchTokens, Coefficients
from engine.algorithm.losses import PolicyLoss
from engine.errors import BadInput
from engine.trainer.micro_batches import MicroBatch
from engine.trainer.ranks.rank_group import RankGroup


class Scored(NamedTuple):
    """A micro-batch with its log-probabilities under the old policy and the reference; None for a model that does not
    exist."""

    batch: MicroBatch
    old: Tensor | None
    reference: Tensor | None
    compared: bool = False
    """Whether its log-probabilities under the step's first weights have been compared with the instances'."""


class DeferredTokens(msgspec.Struct):
    """A rank's part of the batch's trained tokens, as fp32 buffers."""

    log_ratios: bytes
    advantages: bytes


class DeferredWindows:
    """One rank's held windows of a step, grouped by the update that trains them."""

    def __init__(self, loss: PolicyLoss, coefficients: Coefficients, ranks: RankGroup) -> None:
        self._loss = loss
        self._coefficients = coefficients
        self._ranks = ranks
        self._windows: dict[int, list[list[Scored]]] = {}
        self._log_ratios: list[Tensor] = []
        self._advantages: list[Tensor] = []

    def clear_windows(self) -> None:
        """Forget the windows: a new step begins."""
        self._windows = {}
        self._log_ratios = []
        self._advantages = []

    def add_window(self, window: Sequence[Scored], update: int) -> None:
        """Hold a window until its update."""
        self._windows.setdefault(update, []).append(list(window))

    def take_windows(self, update: int) -> list[list[Scored]]:
        """Remove this rank's windows of an update and return them."""
        return self._windows.pop(update, [])

    def add_log_ratios(self, window: Sequence[Scored], log_ratios: Sequence[Tensor | None]) -> None:
        """Add a window to the loss's statistics. `log_ratios`: [T] of policy to old policy for each micro-batch, known
        on the last pipeline stage and None elsewhere."""
        if not self._ranks.judges:
            return  # the rank with `judges` holds these tokens
        for scored, logs in zip(window, log_ratios, strict=True):
            assert logs is not None
            trained = scored.batch.weights > 0
            self._log_ratios.append(logs[trained].float().cpu())
            self._advantages.append(scored.batch.advantages[trained].float().cpu())

    def statistics(self) -> tuple[float, ...]:
        """Return the loss's statistics over the windows added on all ranks, and reset them. Collective over all
        ranks."""
        assert self._loss.statistics is not None
        held = self._ranks.gather(DeferredTokens(_fp32_bytes(self._log_ratios), _fp32_bytes(self._advantages)))
        self._log_ratios = []
        self._advantages = []
        whole = BatchTokens(
            torch.cat([_fp32_tensor(part.log_ratios) for part in held]),
            torch.cat([_fp32_tensor(part.advantages) for part in held]),
        )
        return self._loss.statistics(whole, self._coefficients)


def check_scope(spec: str, loss: PolicyLoss, mode: str) -> None:
    """Raise BadInput for a loss of batch scope in mode `periodic`.

    The config rejects built-in losses of this kind; the scope of a user's loss is known only after its file is loaded.
    """
    if loss.scope != "group" and mode == "periodic":
        raise BadInput(
            f'algorithm.loss = "{spec}" takes its statistics over the whole batch, so no group can be trained before '
            'the last one has arrived: it needs another train.mode than "periodic"'
        )


def _fp32_bytes(parts: Sequence[Tensor]) -> bytes:
    return torch.cat([torch.zeros(0), *parts]).numpy().tobytes()


def _fp32_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.zeros(0)
