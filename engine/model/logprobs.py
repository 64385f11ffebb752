"""Log-probabilities of given tokens, and the entropy of their distributions, over a vocabulary split across tensor
ranks.

The logits are the largest tensor of a training step. The only other tensor of their size is their gradient. Rows are
processed chunk by chunk, in the forward and again in the backward pass, and only a few numbers per row are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = {"cpu": 1 << 19}
"""Bytes of a chunk in fp32, by device type. On a CPU a chunk should fit in the cache."""
CHUNK_BYTES_ELSEWHERE = 1 << 28
"""Bytes of a chunk in fp32 on other devices, where a chunk's work must be large compared with a kernel launch."""


@dataclass(frozen=True)
class Slice:
    """This tensor rank's part of the vocabulary: `size` real entries, starting at `start`."""

    start: int
    size: int
    group: dist.ProcessGroup | None
    """All ranks that hold a part; None if this rank holds the whole vocabulary."""


@dataclass(frozen=True)
class Job:
    """What both passes need in addition to logits and targets."""

    temperature: float
    rows: int
    """Number of rows per chunk."""
    vocabulary: int
    """Number of real entries of the whole vocabulary."""
    part: Slice


class Statistics(NamedTuple):
    """Numbers about each row's distribution over the whole vocabulary, [T] each."""

    chosen: Tensor
    """Log-probability of the target."""
    top: Tensor
    """Largest logit m. It is subtracted from all logits before exp, so that large logits lose no precision."""
    rest: Tensor
    """log Σ exp((logits − m) / temperature), 0 … log V."""
    share: Tensor | None
    """Probability of all tokens in this rank's slice; None if the slice is the whole vocabulary."""
    entropy: Tensor | None
    """Entropy in nats; None if it was not requested."""


@overload
def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    vocabulary: int | None = None,
    chunk: int | None = None,
    entropy: Literal[True] = True,
) -> tuple[Tensor, Tensor]: ...


@overload
def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    vocabulary: int | None = None,
    chunk: int | None = None,
    *,
    entropy: Literal[False],
) -> tuple[Tensor, None]: ...


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    vocabulary: int | None = None,
    chunk: int | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(logits / temperature) at the targets, and the entropy in nats: both [T] fp32, with gradients.

    logits [T, V/tensor] (any float type): this tensor rank's slice of the vocabulary. targets [T]: ids in the whole
    vocabulary. Columns from `vocabulary` on are padding: they have probability 0, and −inf as a target. `chunk`: rows
    per chunk, by default chosen for the device. Without `entropy` the second result is None, and scoring costs a
    quarter to a third less. Collective over the tensor-parallel group, also for T = 0; the gradients of the results
    must be the same on all its ranks.
    """
    job = _prepare_job(logits, temperature, vocabulary, chunk)
    if torch.is_grad_enabled() and logits.requires_grad:
        return _TokenLogprobs.apply(logits, targets, job, entropy)
    found = _statistics(logits, targets, job, entropy)
    return found.chosen, found.entropy


class _TokenLogprobs(torch.autograd.Function):
    """`token_logprobs` with its gradient. It keeps the logits and a few numbers per row for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, job: Job, entropy: bool) -> tuple[Tensor, Tensor | None]:  # noqa: ANN401
        found = _statistics(logits, targets, job, entropy)
        ctx.job = job
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, *found)
        return found.chosen, found.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        of_chosen: Tensor | None,
        of_entropy: Tensor | None,
    ) -> tuple[Tensor | None, None, None, None]:
        """With p the probabilities: ∂ log p_target / ∂z = 1_target − p, ∂H / ∂z = −p (log p + H),
        z = logits / temperature."""
        if of_chosen is None and of_entropy is None:
            return None, None, None, None
        logits, targets, *saved = ctx.saved_tensors
        found = Statistics(*saved)
        inverse = 1.0 / ctx.job.temperature
        of_chosen = torch.zeros_like(found.chosen) if of_chosen is None else of_chosen * inverse
        of_entropy = None if of_entropy is None else of_entropy * inverse
        return (
            _gradient(
                logits=logits, targets=targets, job=ctx.job, found=found, of_chosen=of_chosen, of_entropy=of_entropy
            ),
            None,
            None,
            None,
        )


def _gradient(
    logits: Tensor, targets: Tensor, job: Job, found: Statistics, of_chosen: Tensor, of_entropy: Tensor | None
) -> Tensor:
    """[T, V/tensor] gradient of the logits, from the gradients [T] of the two results, which are already divided by the
    temperature."""
    grad = torch.empty_like(logits)
    columns = grad[:, : job.part.size]
    grad[:, job.part.size :] = 0.0
    share = -1.0 if found.share is None else -found.share
    parts = [columns, logits[:, : job.part.size], of_chosen * share]
    if of_entropy is not None:
        assert found.entropy is not None, "got a gradient of the entropy, but no entropy was computed"
        parts += [found.top, found.entropy - found.rest, of_entropy * share]
    scaled = _Scaled(logits, job, found.chosen.dtype)
    for out, rows, first, *second in zip(*(part.split(job.rows) for part in parts), strict=True):
        weight = first[:, None]
        logs = scaled(rows, second[0] if second else None)
        part = _softmax(logs, out)
        if second:  # log p + H = logs − rest + H
            weight = logs.add_(second[1][:, None]).mul_(second[2][:, None]).add_(weight)
        torch.mul(part, weight, out=part)
        if part is not out:
            out.copy_(part)
    if job.part.size:
        _set_at_targets(
            grad=columns, targets=targets, part=job.part, found=found, of_chosen=of_chosen, of_entropy=of_entropy
        )
    return grad


def _set_at_targets(
    grad: Tensor, targets: Tensor, part: Slice, found: Statistics, of_chosen: Tensor, of_entropy: Tensor | None
) -> None:
    """Set the gradient at each target in place. There 1 − p may be a small difference, so it is computed from log p
    before rounding to the dtype of `grad`."""
    value = of_chosen * -found.chosen.expm1()
    if of_entropy is not None:
        assert found.entropy is not None, "got a gradient of the entropy, but no entropy was computed"
        value -= of_entropy * found.chosen.exp() * (found.chosen + found.entropy)
    here, inside = _local_columns(targets, part)
    at = torch.arange(len(targets), device=targets.device), here  # scatter_ would copy all of a bf16 tensor
    grad[at] = torch.where(inside, value.to(grad.dtype), grad[at])


def _local_columns(targets: Tensor, part: Slice) -> tuple[Tensor, Tensor]:
    """([T] column of each target in this slice, an arbitrary column for a target outside; [T] bool, whether it is
    inside). The slice must not be empty."""
    here = targets - part.start if part.start else targets
    column = here.clamp(0, part.size - 1)
    return column, column == here


def _prepare_job(logits: Tensor, temperature: float, vocabulary: int | None, chunk: int | None) -> Job:
    width = logits.shape[1]
    group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if group is None or group.size() == 1:
        rank = 0
        size = 1
        group = None
    else:
        rank = group.rank()
        size = group.size()
    real = width * size if vocabulary is None else vocabulary
    part = Slice(rank * width, min(max(real - rank * width, 0), width), group)
    limit = CHUNK_BYTES.get(logits.device.type, CHUNK_BYTES_ELSEWHERE)
    return Job(temperature, chunk or max(1, limit // (4 * max(1, width))), real, part)


def _statistics(logits: Tensor, targets: Tensor, job: Job, entropy: bool) -> Statistics:
    """Compute the softmax of each rank's slice, then combine the slices with one maximum and one sum over the ranks."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    columns = logits[:, : job.part.size]
    own = columns.amax(1).to(dtype) if job.part.size else logits.new_full((len(logits),), -torch.inf, dtype=dtype)
    rest, surprise = _own_slice(columns, own, job, entropy) if job.part.size else (torch.zeros_like(own),) * 2
    top = own
    if job.part.group is not None:
        top = own.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, job.part.group)
    chosen = _scaled_targets(columns, targets, top, job)
    share = None
    if job.part.group is not None:
        rest, share, surprise, chosen = _combine_slices(
            (own - top) / job.temperature + rest, surprise, chosen, job.part.group
        )
    chosen = (chosen - rest).masked_fill_(targets.clamp(0, job.vocabulary - 1) != targets, -torch.inf)
    return Statistics(chosen=chosen, top=top, rest=rest, share=share, entropy=surprise if entropy else None)


def _own_slice(logits: Tensor, top: Tensor, job: Job, entropy: bool) -> tuple[Tensor, Tensor]:
    """([T] `rest`, [T] entropy) of this slice alone, from its logits [T, size] and their maximum `top` [T]. The entropy
    is 0 if it is not requested."""
    most = torch.empty_like(top)
    expected = torch.zeros_like(top)
    scaled = _Scaled(logits, job, top.dtype)
    spare = logits.new_empty(min(job.rows, len(logits)), logits.shape[1], dtype=top.dtype)
    for rows, above, out, mean in zip(*(part.split(job.rows) for part in (logits, top, most, expected)), strict=True):
        logs = scaled(rows, above)
        part = torch.softmax(logs, dim=-1, out=spare[: len(rows)])
        torch.amax(part, 1, out=out)
        if entropy:
            torch.linalg.vecdot(part, logs, out=mean)
    rest = -most.log_()  # the most likely token is at 0 in `logs`
    return rest, rest - expected if entropy else expected


def _scaled_targets(logits: Tensor, targets: Tensor, top: Tensor, job: Job) -> Tensor:
    """[T] (logit of the target − top) / temperature if the target is in this slice, else 0."""
    if not job.part.size:
        return torch.zeros_like(top)
    here, inside = _local_columns(targets, job.part)
    below = (logits.gather(1, here[:, None])[:, 0] - top) / job.temperature
    return torch.where(inside, below, torch.zeros_like(top))


def _combine_slices(logs: Tensor, surprise: Tensor, chosen: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """(`rest`, `share`, entropy, `chosen`) of the whole vocabulary, from the slice's `logs` [T] = log Z_r, its entropy
    `surprise` [T] = H_r, and `chosen` [T]. Z = Σ Z_r, H = Σ (Z_r/Z) (H_r − log(Z_r/Z))."""
    logs = logs.clamp(min=-1000.0)  # not −inf: its product with a probability of 0 must be 0
    total = logs.exp()
    sums = torch.stack([total, total * (surprise - logs), chosen])
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    whole, weighted, chosen = sums
    rest = whole.log()
    return rest, total / whole, weighted / whole + rest, chosen


class _Scaled:
    """Computes logits / temperature chunk by chunk, in a buffer that the next chunk overwrites."""

    def __init__(self, logits: Tensor, job: Job, dtype: torch.dtype) -> None:
        self._inverse = 1.0 / job.temperature
        self._dtype = dtype
        self._buffer: Tensor | None = None
        self._size = (min(job.rows, len(logits)), job.part.size)

    def __call__(self, logits: Tensor, top: Tensor | None) -> Tensor:
        """Return (chunk [t, size] − top [t]) / temperature, at least in fp32. Without `top`, nothing is subtracted, and
        the result may be the chunk itself."""
        if top is None and self._inverse == 1.0 and logits.dtype is self._dtype:
            return logits
        if self._buffer is None:
            self._buffer = logits.new_empty(self._size, dtype=self._dtype)
        out = self._buffer[: len(logits)]
        if top is not None:
            torch.sub(logits, top[:, None], out=out)
        elif logits.dtype is self._dtype:
            return torch.mul(logits, self._inverse, out=out)
        else:
            out.copy_(logits)  # first: a product of bf16 values would be rounded to bf16
        return out if self._inverse == 1.0 else out.mul_(self._inverse)


def _softmax(logs: Tensor, out: Tensor) -> Tensor:
    """Softmax over the last dimension, written to `out` if its dtype matches and it is contiguous, else to a new
    tensor."""
    if out.dtype is logs.dtype and out.is_contiguous():
        return torch.softmax(logs, dim=-1, out=out)
    return torch.softmax(logs, dim=-1)
