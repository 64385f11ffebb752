"""Log-probabilities of given tokens, and the entropy of their distributions, from the last hidden states and the output
layer's weight, over a vocabulary split across tensor ranks.

The logits would be the largest tensor of a training step. They are computed for some tokens at a time, in the forward
and again in the backward pass, where their gradient takes their place. Only a few numbers per token are kept, and the
logits if one chunk has all of them. Megatron and torch have no such function with one result per token: torch's
`linear_cross_entropy` and those of Liger and Apple compute their gradients in the forward pass, for a sum whose weights
are already known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.model.fusion import can_fuse, compile_once
from engine.model.linear import output_product, token_product, weight_gradient

CHUNK_BYTES = {"cpu": 1 << 19}
"""Bytes of a chunk in fp32, by device type. On a CPU a chunk should fit in the cache."""
CHUNK_BYTES_ELSEWHERE = 1 << 28
"""Bytes of a chunk in fp32 on other devices, where a chunk's work must be large compared with a kernel launch."""
LOGITS_BYTES = 1 << 30
"""Bytes of the logits that are in memory at a time. Each product reads the whole weight, and adds to its whole gradient
in the backward pass, so it must have thousands of tokens."""
WHOLE_TOKENS = 128
"""The tokens of a product are a multiple of this, if there are more."""


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
    tokens: int
    """Number of tokens whose logits are computed at a time."""
    rows: int
    """Number of rows of logits that are processed at a time."""
    wide: bool
    """Whether logits of a bf16 model are kept in fp32 (`linear.output_product`)."""
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

    def of(self, part: slice) -> Statistics:
        """The numbers of some rows."""
        return Statistics(*(None if one is None else one[part] for one in self))  # type: ignore[arg-type]


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    vocabulary: int | None = None,
    chunk: int | None = None,
    wide: bool = False,
    entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(logits / temperature) at the targets, and the entropy in nats: both [T] fp32, with gradients,
    where logits = hidden · weightᵀ.

    hidden [T, h]: the same on all tensor ranks. weight [V/tensor, h]: this tensor rank's slice of the vocabulary. If it
    has a `main_grad`, its gradient is added to that, and autograd gets None. targets [T]: ids in the whole vocabulary.
    Rows of `weight` from `vocabulary` on are padding: they have probability 0, and −inf as a target. `chunk`: tokens
    per chunk, by default chosen for the device. `wide`: whether the logits of a bf16 model are kept in fp32. Without
    `entropy` the second result is None, and scoring costs a quarter to a third less. Collective over the
    tensor-parallel group, also for T = 0; the gradients of the results must be the same on all its ranks.
    """
    job = _prepare_job(weight, temperature, vocabulary, chunk, wide)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _TokenLogprobs.apply(hidden, weight, targets, job, entropy)
    found, _ = _statistics(hidden, weight, targets, job, entropy)
    return found.chosen, found.entropy


class _TokenLogprobs(torch.autograd.Function):
    """`token_logprobs` with its gradient. It keeps a few numbers per token for the backward pass, and the logits of a
    single chunk."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        job: Job,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        found, logits = _statistics(hidden, weight, targets, job, entropy)
        ctx.job = job
        ctx.main_grad = getattr(weight, "main_grad", None)
        ctx.logits = logits
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, *found)
        return found.chosen, found.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        of_chosen: Tensor | None,
        of_entropy: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """With p the probabilities: ∂ log p_target / ∂z = 1_target − p, ∂H / ∂z = −p (log p + H),
        z = logits / temperature."""
        if of_chosen is None and of_entropy is None:
            return None, None, None, None, None
        hidden, weight, *_ = ctx.saved_tensors
        total = ctx.main_grad
        if total is None and len(hidden) > ctx.job.tokens:
            total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        to_hidden = torch.empty_like(hidden)
        to_weight = None
        sums = []
        for part, gradient in _logit_gradients(ctx, of_chosen, of_entropy):
            if ctx.needs_input_grad[0]:
                to_hidden[part] = token_product(gradient, weight)
                if ctx.job.part.group is not None:  # while the weight's gradient is computed
                    sums.append(dist.all_reduce(to_hidden[part], group=ctx.job.part.group, async_op=True))
            if ctx.needs_input_grad[1]:
                to_weight = weight_gradient(gradient, hidden[part], total)
            del gradient  # before the next chunk's logits are made
        for one in sums:
            one.wait()
        if total is not None and ctx.main_grad is None:
            to_weight = total.to(weight.dtype)
        return to_hidden, to_weight, None, None, None


def _logit_gradients(
    ctx: Any,  # noqa: ANN401
    of_chosen: Tensor | None,
    of_entropy: Tensor | None,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of each chunk, and the gradient [t, V/tensor] of their logits. The kept logits are used up."""
    hidden, weight, targets, *saved = ctx.saved_tensors
    job: Job = ctx.job
    found = Statistics(*saved)
    inverse = 1.0 / job.temperature
    of_chosen = torch.zeros_like(found.chosen) if of_chosen is None else of_chosen * inverse
    of_entropy = None if of_entropy is None else of_entropy * inverse
    kept = ctx.logits
    ctx.logits = None
    for start in range(0, max(1, len(hidden)), job.tokens):
        part = slice(start, start + job.tokens)
        logits = output_product(hidden[part], weight, job.wide) if kept is None else kept
        _turn_into_gradient(
            logits=logits,
            targets=targets[part],
            job=job,
            found=found.of(part),
            of_chosen=of_chosen[part],
            of_entropy=None if of_entropy is None else of_entropy[part],
        )
        yield part, logits.to(weight.dtype)
        del logits


def _turn_into_gradient(
    logits: Tensor, targets: Tensor, job: Job, found: Statistics, of_chosen: Tensor, of_entropy: Tensor | None
) -> None:
    """Overwrite logits [t, V/tensor] by their gradient, from the gradients [t] of the two results, which are already
    divided by the temperature. On CUDA in one pass, else in the single operations that are its oracle."""
    columns = logits[:, : job.part.size]
    logits[:, job.part.size :] = 0.0
    if can_fuse(logits):
        none = torch.zeros_like(of_chosen)
        given = (none if one is None else one for one in (found.entropy, of_chosen, of_entropy))
        compile_once(overwrite_by_gradient)(columns, found.top, found.rest, *given, _inverse(found.top, job))
    else:
        _overwrite_in_chunks(columns, job=job, found=found, of_chosen=of_chosen, of_entropy=of_entropy)
    if job.part.size:
        _set_at_targets(
            grad=columns, targets=targets, part=job.part, found=found, of_chosen=of_chosen, of_entropy=of_entropy
        )


def overwrite_by_gradient(
    logits: Tensor, top: Tensor, rest: Tensor, entropy: Tensor, of_chosen: Tensor, of_entropy: Tensor, inverse: Tensor
) -> None:
    """Overwrite logits [t, n] by −p (of_chosen + of_entropy (log p + entropy)), of numbers [t] over the whole
    vocabulary and of `inverse` [], one over the temperature. For compilation: then each logit is read and written once.
    """
    logs = (logits.to(top.dtype) - top[:, None]) * inverse - rest[:, None]
    weight = of_chosen[:, None] + of_entropy[:, None] * (logs + entropy[:, None])
    logits.copy_(logs.exp().neg() * weight)


def slice_sums(logits: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """([t] largest logit, [t] `rest`, [t] entropy) of logits [t, n], for compilation."""
    wide = logits.to(inverse.dtype)
    top = wide.amax(1)
    logs = (wide - top[:, None]) * inverse
    shares = logs.exp()
    total = shares.sum(1)
    rest = total.log()
    return top, rest, rest - (shares * logs).sum(1) / total


def _inverse(like: Tensor, job: Job) -> Tensor:
    """One over the temperature, as a tensor, because compiled code is made for each value of a number."""
    return like.new_full((), 1.0 / job.temperature)


def _overwrite_in_chunks(
    columns: Tensor, job: Job, found: Statistics, of_chosen: Tensor, of_entropy: Tensor | None
) -> None:
    """`overwrite_by_gradient` in single operations on a few rows at a time."""
    share = -1.0 if found.share is None else -found.share
    parts = [columns, of_chosen * share]
    if of_entropy is not None:
        assert found.entropy is not None, "got a gradient of the entropy, but no entropy was computed"
        parts += [found.top, found.entropy - found.rest, of_entropy * share]
    scaled = _Scaled(columns, job, found.chosen.dtype)
    for out, first, *second in zip(*(part.split(job.rows) for part in parts), strict=True):
        weight = first[:, None]
        logs = scaled(out, second[0] if second else None)
        part = _softmax(logs, out)
        if second:  # log p + H = logs − rest + H
            weight = logs.add_(second[1][:, None]).mul_(second[2][:, None]).add_(weight)
        torch.mul(part, weight, out=part)
        if part is not out:
            out.copy_(part)


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
    inside). An empty slice has no columns, so none of the first may be used."""
    here = targets - part.start if part.start else targets
    return here.clamp(0, part.size - 1), (here >= 0) & (here < part.size)


def _prepare_job(weight: Tensor, temperature: float, vocabulary: int | None, chunk: int | None, wide: bool) -> Job:
    width = max(1, len(weight))
    group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if group is None or group.size() == 1:
        rank = 0
        size = 1
        group = None
    else:
        rank = group.rank()
        size = group.size()
    real = len(weight) * size if vocabulary is None else vocabulary
    part = Slice(rank * width, min(max(real - rank * width, 0), width), group)
    rows = max(1, CHUNK_BYTES.get(weight.device.type, CHUNK_BYTES_ELSEWHERE) // (4 * width))
    whole = LOGITS_BYTES // ((4 if wide else weight.itemsize) * width * WHOLE_TOKENS) * WHOLE_TOKENS
    tokens = chunk or max(WHOLE_TOKENS, whole)
    return Job(temperature=temperature, tokens=tokens, rows=min(rows, tokens), wide=wide, vocabulary=real, part=part)


def _statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, job: Job, entropy: bool
) -> tuple[Statistics, Tensor | None]:
    """Compute the softmax of each rank's slice, then combine the slices with one maximum and one sum over the ranks.
    Also return the logits if one chunk has all of them."""
    parts = []
    kept = None
    for x, picked in zip(hidden.split(job.tokens), targets.split(job.tokens), strict=True):
        logits = output_product(x, weight, job.wide)
        parts.append(_slice_statistics(logits[:, : job.part.size], picked, job, entropy))
        kept = logits if len(x) == len(hidden) else None
        del logits  # before the next chunk's are made
    own, rest, surprise, chosen = map(torch.cat, zip(*parts, strict=True))
    top = own
    if job.part.group is not None:
        top = own.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, job.part.group)
    _, inside = _local_columns(targets, job.part)
    chosen = torch.where(inside, (chosen - top) / job.temperature, torch.zeros_like(top))
    share = None
    if job.part.group is not None:
        rest, share, surprise, chosen = _combine_slices(
            (own - top) / job.temperature + rest, surprise, chosen, job.part.group
        )
    chosen = (chosen - rest).masked_fill_(targets.clamp(0, job.vocabulary - 1) != targets, -torch.inf)
    return Statistics(chosen=chosen, top=top, rest=rest, share=share, entropy=surprise if entropy else None), kept


def _slice_statistics(
    logits: Tensor, targets: Tensor, job: Job, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """([t] largest logit, [t] `rest`, [t] entropy, [t] logit of the target) of this slice alone, from its logits
    [t, size]. The entropy is 0 if it is not requested, the target's logit arbitrary if it is outside."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if not job.part.size:
        none = logits.new_zeros(len(logits), dtype=dtype)
        return torch.full_like(none, -torch.inf), none, none, none
    here, _ = _local_columns(targets, job.part)
    chosen = logits.gather(1, here[:, None])[:, 0].to(dtype)
    if can_fuse(logits):
        return *compile_once(slice_sums)(logits, _inverse(chosen, job)), chosen
    top = logits.amax(1).to(dtype)
    return top, *_own_slice(logits, top, job, entropy), chosen


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
