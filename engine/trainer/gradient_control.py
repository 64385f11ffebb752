"""The cosine of consecutive gradients, and what follows from it: measured, or controlled by GAC (Algorithm 1) or a
user's own.

Works on the raw reduced gradients, before clipping: control, then clip, then Adam. Every parameter counts once, as in
Megatron's gradient norm. Costs one copy of the gradient and one all-reduce of three numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypedDict

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from engine.algorithm.alignment import Step
from engine.config import Config
from engine.errors import BadInput, MetronomeError
from engine.run.user_algorithms import control_of, decided
from engine.run.user_code import UserCode, describe
from engine.types import GradientFigures


class ControlState(TypedDict, total=False):
    """What a checkpoint keeps beside the last gradient; empty before there is one."""

    skipped: int
    seen: list[float]


class GradientControl:
    """One rank's side of it; every call is a collective of all ranks."""

    def __init__(self, config: Config, ddp: DistributedDataParallel, optimizer: MegatronOptimizer) -> None:
        algorithm = config.algorithm
        self._spec = algorithm.gradient_control
        self._decide = control_of(self._spec)
        self._sharded = config.train.distributed_optimizer
        low = algorithm.gac_low
        high = algorithm.gac_high
        self._low, self._high = (None if value == "auto" else value for value in (low, high))
        self.seen: list[float] = []
        """The cosines so far."""
        self._optimizer = optimizer
        self._buffers = ddp.buffers + ddp.expert_parallel_buffers
        self._previous: list[Tensor] | None = None
        self.skipped = 0
        """Updates skipped in a row."""
        self._cosine: float | None = None

    @torch.no_grad()
    def act(self) -> bool:
        """Measure and, with GAC, project the step's reduced gradient in place; False where the update must be skipped.

        What comes next is compared with the gradient as it was, whatever became of it.
        """
        self._optimizer.prepare_grads()
        if self._previous is None:
            self._previous = [buffer.grad_data.clone() for buffer in self._buffers]
            return True
        dot, square, before = self._products()
        if not square or not before:  # no direction, so nothing is measured, nor can the gradient be turned
            self._cosine = None
            self.skipped = 0
            self._turn(0.0)
            return True
        self._cosine = dot / math.sqrt(square * before)
        factor = self._decided(Step(self._cosine, tuple(self.seen), self._low, self._high))
        self._turn(0.0 if factor is None else (1.0 - factor) * dot / before)
        self.seen.append(self._cosine)
        self.skipped = self.skipped + 1 if factor is None else 0
        if self.skipped and dist.get_rank() == 0:
            print(
                f"gradient control {self._spec}: cosine with the last gradient {self._cosine:.3f}: update skipped, "
                f"{self.skipped} in a row",
                flush=True,
            )
        return factor is not None

    def _decided(self, step: Step) -> float | None:
        """What part of the gradient along the last one stays, None to skip.
        Raises BadInput where a user's function fails."""
        found: float | None = None
        with UserCode() as attempt:
            found = decided(self._decide, step)
        if attempt.error is not None:
            raise BadInput(f'algorithm.gradient_control = "{self._spec}": it failed: {describe(attempt.error)}')
        return found

    def figures(self) -> GradientFigures:
        """As steps.jsonl names them; nothing before the second step,
        nor where this gradient or the last one is zero."""
        if self._cosine is None:
            return {}
        return {"grad_cosine": self._cosine, "skipped_updates": self.skipped}

    def _turn(self, share: float) -> None:
        """gradient −= share · previous; previous = the gradient as it was."""
        assert self._previous is not None
        for buffer, previous in zip(self._buffers, self._previous, strict=True):
            raw = buffer.grad_data.clone() if share else buffer.grad_data
            if share:
                buffer.grad_data.add_(previous, alpha=-share)
            previous.copy_(raw)

    def _products(self) -> tuple[float, float, float]:
        """⟨g, g'⟩, ⟨g, g⟩ and ⟨g', g'⟩ over the whole model, g' the last gradient."""
        total = [0.0, 0.0, 0.0]
        for base in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            parts = torch.zeros(3, device=self._buffers[0].grad_data.device)
            for grad in () if base.is_stub_optimizer else base.get_main_grads_for_grad_norm():
                last = self._last(grad)
                parts += torch.stack([(grad * last).sum(), grad.square().sum(), last.square().sum()])
            dist.all_reduce(parts, group=base.get_grad_stats_parallel_group())
            total = [whole + part for whole, part in zip(total, parts.tolist(), strict=True)]
        return total[0], total[1], total[2]

    def _last(self, grad: Tensor) -> Tensor:
        """The last gradient where this one, a view of a buffer, lies."""
        assert self._previous is not None
        for buffer, previous in zip(self._buffers, self._previous, strict=True):
            first = (grad.data_ptr() - buffer.grad_data.data_ptr()) // grad.element_size()
            if 0 <= first < previous.numel():
                return previous[first : first + grad.numel()].view_as(grad)
        raise MetronomeError("gradient control: the optimizer's gradient is no view of Megatron's gradient buffers")

    # checkpoints ----------------------------------------------------------------------------------

    def state(self) -> ControlState:
        """What is not in tensors; {} before the first gradient."""
        return {"skipped": self.skipped, "seen": self.seen} if self._previous is not None else {}

    def load(self, state: ControlState) -> None:
        """Take `state()` back; its tensors are loaded into `previous()`."""
        self.skipped = int(state["skipped"])
        self.seen = [float(value) for value in state["seen"]]

    def previous(self, loading: bool = False) -> dict[int, Tensor] | None:
        """The last gradient, whole, by the id of the parameter it is of; None before there is one.

        With `loading` room for one is made. Under the distributed optimizer each replica has reduced only its part, and
        the parts are put together (a collective of the replicas).
        """
        if self._previous is None:
            if not loading:
                return None
            self._previous = [torch.zeros_like(buffer.grad_data) for buffer in self._buffers]
        elif self._sharded:
            self._gather()
        return dict(self._by_parameter())

    def _by_parameter(self) -> Iterator[tuple[int, Tensor]]:
        for buffer in self._buffers:
            for parameter in buffer.params:
                yield id(parameter), self._last(parameter.main_grad)

    def _gather(self) -> None:
        assert self._previous is not None
        for buffer, previous in zip(self._buffers, self._previous, strict=True):
            size = buffer.data_parallel_world_size
            rank = buffer.data_parallel_group.rank()
            for bucket in buffer.buckets:
                whole = previous[bucket.offset : bucket.offset + bucket.grad_data.numel()]
                dist.all_gather_into_tensor(whole, whole.chunk(size)[rank].clone(), group=buffer.data_parallel_group)
