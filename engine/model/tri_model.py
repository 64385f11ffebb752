"""The tri-model: policy, old policy and reference in one layout on the same ranks (Periodic Asynchrony §4.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from engine.model.build import Computation, build_model, compute_hidden, row_multiple, target_logprobs
from engine.model.hf_weights import export_weights
from engine.model.layout import Layout, make_layout
from engine.model.shape import ModelShape

Load = Callable[[GPTModel], None]
"""Loads weights into this rank's part of a model."""


class TriModel:
    """The policy, and the old policy and the reference if the algorithm needs them."""

    def __init__(
        self,
        shape: ModelShape,
        computation: Computation,
        temperature: float,
        base: Load,
        old: bool = False,
        reference: Load | None = None,
        offload: bool = False,
    ) -> None:
        """`base` loads the policy and, with `old`, the old policy. `reference` loads the reference; None: no reference.

        With `offload` the weights of the frozen models stay in host memory and take turns in one model on the device.
        `score_layouts` computes log-probabilities at `temperature`.
        """
        self.shape = shape
        self.temperature = temperature
        self.device = computation.device
        self._multiple = row_multiple(computation)
        self.policy = build_model(shape, computation)
        base(self.policy)
        copies = {"old": base if old else None, "reference": reference}
        self._frozen = _build_frozen(shape, computation, {name: load for name, load in copies.items() if load}, offload)

    @property
    def old(self) -> Frozen | None:
        """The old policy; None if the algorithm has none."""
        return self._frozen.get("old")

    @property
    def reference(self) -> Frozen | None:
        """The reference; None if the algorithm has none."""
        return self._frozen.get("reference")

    def copy_policy_to_old(self) -> None:
        """Copy the policy's weights to the old policy (Algorithm 1, line 20). Does nothing without an old policy."""
        if self.old is not None:
            self.old.set(list(self.policy.parameters()))

    def score(self, name: str, layouts: Sequence[Layout]) -> list[Tensor | None]:
        """Return the [T] log-probabilities of each layout under the "old" policy or the "reference".

        All are None if there is no such model, and on all pipeline stages but the last. Collective over the replica.
        """
        frozen = self._frozen.get(name)
        if frozen is None or not layouts:
            return [None] * len(layouts)
        return score_layouts(frozen.model(), layouts, self.temperature)

    def export(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) pairs of this pipeline stage, each a copy on the host.

        `dtype`: dtype to cast to; None keeps their own. Collective over the stage's ranks.
        """
        for name, tensor in self.tensors():
            yield name, tensor.to("cpu", dtype, copy=True).contiguous()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) pairs of this pipeline stage, on the device. They are valid until the
        parameters change. Collective over the stage's ranks."""
        parameters = {name: parameter.detach() for name, parameter in self.policy.named_parameters()}
        yield from export_weights(parameters, self.policy, self.shape)

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return the policy's log-probabilities, at temperature 1, of token_ids[1:], each given the tokens before it.

        [] on all pipeline stages but the last. Collective over the replica, and over all replicas that share experts.
        """
        rank = parallel_state.get_context_parallel_rank()
        size = parallel_state.get_context_parallel_world_size()
        row = make_layout([(token_ids[:1], [token_ids[1:]])]).aligned(self._multiple).shard(rank, size).to(self.device)
        (scores,) = score_layouts(self.policy, [row], 1.0)
        if scores is None:
            return []
        return [float(value) for value in whole_row(scores, row).tolist()]


class Frozen:
    """A frozen model. If it is `shared`, its weights stay in host memory, and others use its model on the device."""

    def __init__(self, model: GPTModel, shared: bool) -> None:
        self._model = model.requires_grad_(False).eval()
        self._host = [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()] if shared else None

    @property
    def weights(self) -> list[Tensor]:
        """The weights, in the order of the model's parameters."""
        return self._host or [parameter.detach() for parameter in self._model.parameters()]

    @torch.no_grad()
    def set(self, weights: Sequence[Tensor]) -> None:
        """Copy weights, given in the order of the model's parameters, into this model."""
        for ours, theirs in zip(self.weights, weights, strict=True):
            ours.copy_(theirs)

    @torch.no_grad()
    def model(self) -> GPTModel:
        """Return the model with these weights in it. They stay until another `Frozen` that shares the model calls
        `model`."""
        if self._host is not None:
            for ours, theirs in zip(self._model.parameters(), self._host, strict=True):
                ours.copy_(theirs, non_blocking=True)
        return self._model


def _build_frozen(
    shape: ModelShape, computation: Computation, loads: dict[str, Load], offload: bool
) -> dict[str, Frozen]:
    frozen: dict[str, Frozen] = {}
    model: GPTModel | None = None
    for name, load in loads.items():
        if model is None or not offload:
            model = build_model(shape, computation)
        load(model)
        frozen[name] = Frozen(model, offload)
    return frozen


@torch.no_grad()
def score_layouts(model: GPTModel, layouts: Sequence[Layout], temperature: float) -> list[Tensor | None]:
    """Return the [T] log-probabilities of each layout's response tokens, from a forward-only pass. None on all pipeline
    stages but the last. Collective over the replica."""

    def forward(batches: Iterator[Layout], stage: GPTModel) -> tuple[Tensor, Callable[..., Tensor]]:
        batch = next(batches)
        return compute_hidden(stage, batch), partial(_logprobs_only, model, batch, temperature)

    scores = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(layouts),
        model=[model],
        num_microbatches=len(layouts),
        seq_length=1,  # unused with variable_seq_lengths
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return list(scores) if parallel_state.is_pipeline_last_stage() else [None] * len(layouts)


def whole_row(scores: Tensor, row: Layout) -> Tensor:
    """Return the scores of all response tokens of a row, of which each context-parallel rank has a part. Collective
    over the context-parallel ranks."""
    if row.shards == 1:
        return scores
    whole = scores.new_zeros(sum(row.lengths))
    whole[row.kept] = scores
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole


def _logprobs_only(model: GPTModel, layout: Layout, temperature: float, out: Tensor, non_loss_data: bool) -> Tensor:
    return target_logprobs(model, out, layout, temperature, entropy=False)[0]
