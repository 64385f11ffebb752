"""Measures the cosine between the gradients of two consecutive steps and changes the gradient accordingly: by GAC
(engine.algorithm.alignment) or a user's control.

It works on the reduced gradients before clipping: control, then clip, then Adam. A parameter held by several ranks
counts once, as in Megatron's gradient norm. It costs one copy of the gradient and one all-reduce of three numbers.
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
from engine.run.logs import log_line
from engine.run.user_algorithms import call_control, control_of
from engine.run.user_code import UserCode, describe_error
from engine.types import OptionalFigures


class ControlState(TypedDict, total=False):
    """Gradient control's part of a checkpoint, apart from the last gradient; empty before the first gradient."""

    skipped: int
    skipped_of_run: int
    seen: list[float]


class GradientControl:
    """Gradient control on one rank. `act` is a collective over all ranks."""

    def __init__(self, config: Config, ddp: DistributedDataParallel, optimizer: MegatronOptimizer) -> None:
        algorithm = config.algorithm
        self._spec = algorithm.gradient_control
        self._decide = control_of(self._spec)
        self._sharded = config.train.distributed_optimizer
        low = algorithm.gac_low
        high = algorithm.gac_high
        self._low, self._high = (None if value == "auto" else value for value in (low, high))
        self._most_skips = config.train.max_staleness if algorithm.gac_skips == "staleness" else algorithm.gac_skips
        self.seen: list[float] = []
        """The cosines of the run so far, oldest first."""
        self._optimizer = optimizer
        self._buffers = ddp.buffers + ddp.expert_parallel_buffers
        self._previous: list[Tensor] | None = None
        self.skipped = 0
        """Consecutive updates skipped."""
        self.skipped_of_run = 0
        """Updates skipped since the start of the run."""
        self._cosine: float | None = None

    @torch.no_grad()
    def act(self) -> bool:
        """Measure the cosine and change the step's reduced gradient in place, as the control decides.

        Returns False if the update must be skipped. The next gradient is compared with this one as it was before the
        change. Raises BadInput if a user's control fails. Collective over all ranks.
        """
        self._optimizer.prepare_grads()
        if self._previous is None:
            self._previous = [buffer.grad_data.clone() for buffer in self._buffers]
            return True
        dot, square, before = self._products()
        if not square or not before:  # a zero gradient has no direction: there is no cosine to measure or to control
            self._cosine = None
            self.skipped = 0
            self._subtract_last(0.0)
            return True
        self._cosine = dot / math.sqrt(square * before)
        factor = self._factor(
            Step(
                cosine=self._cosine,
                seen=tuple(self.seen),
                low=self._low,
                high=self._high,
                skipped=self.skipped,
                most_skips=self._most_skips,
            )
        )
        self._subtract_last(0.0 if factor is None else (1.0 - factor) * dot / before)
        self.seen.append(self._cosine)
        self.skipped = self.skipped + 1 if factor is None else 0
        self.skipped_of_run += factor is None
        if self.skipped and dist.get_rank() == 0:
            log_line(
                f"gradient control {self._spec}: cosine with the last gradient {self._cosine:.3f}: update skipped, "
                f"{self.skipped} in a row"
            )
        return factor is not None

    def _factor(self, step: Step) -> float | None:
        """Return the control's factor for the gradient's component along the last gradient; None to skip the update.

        Raises BadInput if a user's control fails.
        """
        found: float | None = None
        with UserCode() as attempt:
            found = call_control(self._decide, step)
        if attempt.error is not None:
            raise BadInput(f'algorithm.gradient_control = "{self._spec}": it failed: {describe_error(attempt.error)}')
        return found

    def figures(self) -> OptionalFigures:
        """Return the figures by the keys of steps.jsonl.

        They are empty before the second gradient, and if this gradient or the last one is zero.
        """
        if self._cosine is None:
            return {}
        return {
            "grad_cosine": self._cosine,
            "skipped_updates": self.skipped,
            "skipped_updates_of_run": self.skipped_of_run,
        }

    def _subtract_last(self, share: float) -> None:
        """Subtract `share` times the last gradient from this one, and store the unchanged gradient as the new last
        gradient."""
        assert self._previous is not None
        for buffer, previous in zip(self._buffers, self._previous, strict=True):
            raw = buffer.grad_data.clone() if share else buffer.grad_data
            if share:
                buffer.grad_data.add_(previous, alpha=-share)
            previous.copy_(raw)

    def _products(self) -> tuple[float, float, float]:
        """Return ⟨g, g'⟩, ⟨g, g⟩ and ⟨g', g'⟩ over the whole model; g is the gradient, g' the last one.

        Collective over all ranks.
        """
        total = [0.0, 0.0, 0.0]
        for base in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            parts = torch.zeros(3, device=self._buffers[0].grad_data.device)
            for grad in () if base.is_stub_optimizer else base.get_main_grads_for_grad_norm():
                last = self._last_at(grad)
                parts += torch.stack([(grad * last).sum(), grad.square().sum(), last.square().sum()])
            dist.all_reduce(parts, group=base.get_grad_stats_parallel_group())
            total = [whole + part for whole, part in zip(total, parts.tolist(), strict=True)]
        return total[0], total[1], total[2]

    def _last_at(self, grad: Tensor) -> Tensor:
        """Return the part of the last gradient at the position that `grad` has in Megatron's buffers."""
        assert self._previous is not None
        for buffer, previous in zip(self._buffers, self._previous, strict=True):
            first = (grad.data_ptr() - buffer.grad_data.data_ptr()) // grad.element_size()
            if 0 <= first < previous.numel():
                return previous[first : first + grad.numel()].view_as(grad)
        raise MetronomeError(
            "gradient control: the optimizer's gradient does not share memory with Megatron's gradient buffers"
        )

    # checkpoints ----------------------------------------------------------------------------------

    def state(self) -> ControlState:
        """Return the state that is not stored as tensors; {} before the first gradient."""
        if self._previous is None:
            return {}
        return {"skipped": self.skipped, "skipped_of_run": self.skipped_of_run, "seen": self.seen}

    def load_state(self, state: ControlState) -> None:
        """Restore the state that `state()` returned. Load the last gradient into `previous(loading=True)`."""
        self.skipped = int(state["skipped"])
        self.skipped_of_run = int(state["skipped_of_run"])
        self.seen = [float(value) for value in state["seen"]]

    def previous(self, loading: bool = False) -> dict[int, Tensor] | None:
        """Return the whole last gradient by `id` of its parameter; None before the first gradient.

        With `loading`, allocates memory to load a gradient into if there is none. With the distributed optimizer each
        replica has reduced only a part, so the parts are gathered: a collective over the replicas.
        """
        if self._previous is None:
            if not loading:
                return None
            self._previous = [torch.zeros_like(buffer.grad_data) for buffer in self._buffers]
        elif self._sharded:
            self._gather_parts()
        return dict(self._by_parameter())

    def _by_parameter(self) -> Iterator[tuple[int, Tensor]]:
        for buffer in self._buffers:
            for parameter in buffer.params:
                yield id(parameter), self._last_at(parameter.main_grad)

    def _gather_parts(self) -> None:
        assert self._previous is not None
        for buffer, previous in zip(self._buffers, self._previous, strict=True):
            size = buffer.data_parallel_world_size
            rank = buffer.data_parallel_group.rank()
            for bucket in buffer.buckets:
                whole = previous[bucket.offset : bucket.offset + bucket.grad_data.numel()]
                dist.all_gather_into_tensor(whole, whole.chunk(size)[rank].clone(), group=buffer.data_parallel_group)
