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

from engine.model.build import Computation, build_model, logits, row_multiple
from engine.model.hf_weights import export
from engine.model.layout import Layout, layout
from engine.model.logprobs import token_logprobs
from engine.model.shape import ModelShape

Load = Callable[[GPTModel], None]
"""Puts weights into a model of this rank."""


class TriModel:
    """The policy and its frozen copies, as far as the algorithm needs them."""

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
        """`base` loads the policy and, with `old`, the old policy; `reference` its own weights (None for kl_coef = 0).

        With `offload` the frozen copies wait in host memory and take turns in one model on the device.
        """
        self.shape = shape
        self.temperature = temperature
        self.device = computation.device
        self._multiple = row_multiple(computation)
        self.policy = build_model(shape, computation)
        base(self.policy)
        copies = {"old": base if old else None, "reference": reference}
        self._frozen = _frozen(shape, computation, {name: load for name, load in copies.items() if load}, offload)

    @property
    def old(self) -> Frozen | None:
        """The old policy, where the algorithm has one."""
        return self._frozen.get("old")

    @property
    def reference(self) -> Frozen | None:
        """The reference, where the algorithm has one."""
        return self._frozen.get("reference")

    def copy_policy_to_old(self) -> None:
        """Move the policy's weights into the old policy's (Algorithm 1, line 20); nothing without an old policy."""
        if self.old is not None:
            self.old.set(list(self.policy.parameters()))

    def score(self, name: str, layouts: Sequence[Layout]) -> list[Tensor | None]:
        """[T] log-probabilities of each layout under the "old" policy or the "reference".

        None where there is no such model and on all but the last pipeline stage. A collective of the replica.
        """
        frozen = self._frozen.get(name)
        if frozen is None or not layouts:
            return [None] * len(layouts)
        return score(frozen.model(), layouts, self.temperature, self.shape.vocabulary)

    def export(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """This stage's (Hugging Face name, tensor) pairs, whole, each a copy on the host. A collective of its ranks.

        `dtype`: what they are cast to, by default nothing.
        """
        for name, tensor in self.tensors():
            yield name, tensor.to("cpu", dtype, copy=True).contiguous()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """This stage's (Hugging Face name, tensor) pairs, whole, on the device, valid until the parameters change.
        A collective of its ranks."""
        parameters = {name: parameter.detach() for name, parameter in self.policy.named_parameters()}
        yield from export(parameters, self.policy, self.shape)

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """The policy's log-probabilities (temperature 1) of token_ids[1:], each after those before it.

        [] on all but the last pipeline stage. A collective of the replica (of those that share experts, too).
        """
        rank = parallel_state.get_context_parallel_rank()
        size = parallel_state.get_context_parallel_world_size()
        row = layout([(token_ids[:1], [token_ids[1:]])]).aligned(self._multiple).shard(rank, size).to(self.device)
        (scores,) = score(self.policy, [row], 1.0, self.shape.vocabulary)
        if scores is None:
            return []
        whole = scores.new_zeros(len(token_ids) - 1)
        whole[row.kept] = scores
        if size > 1:
            dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        return [float(value) for value in whole.tolist()]


class Frozen:
    """A frozen model, or its weights in host memory and a model on the device that it shares with others."""

    def __init__(self, model: GPTModel, shared: bool) -> None:
        self._model = model.requires_grad_(False).eval()
        self._host = [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()] if shared else None

    @property
    def weights(self) -> list[Tensor]:
        """Its weights, in the order of the model's parameters."""
        return self._host or [parameter.detach() for parameter in self._model.parameters()]

    @torch.no_grad()
    def set(self, weights: Sequence[Tensor]) -> None:
        """Take over weights, in the order of the model's parameters."""
        for ours, theirs in zip(self.weights, weights, strict=True):
            ours.copy_(theirs)

    @torch.no_grad()
    def model(self) -> GPTModel:
        """The model with these weights in it, until another copy takes its turn."""
        if self._host is not None:
            for ours, theirs in zip(self._model.parameters(), self._host, strict=True):
                ours.copy_(theirs, non_blocking=True)
        return self._model


def _frozen(shape: ModelShape, computation: Computation, loads: dict[str, Load], offload: bool) -> dict[str, Frozen]:
    frozen: dict[str, Frozen] = {}
    model: GPTModel | None = None
    for name, load in loads.items():
        if model is None or not offload:
            model = build_model(shape, computation)
        load(model)
        frozen[name] = Frozen(model, offload)
    return frozen


@torch.no_grad()
def score(model: GPTModel, layouts: Sequence[Layout], temperature: float, vocabulary: int) -> list[Tensor | None]:
    """[T] log-probabilities of each layout's response tokens by a forward-only pass; None on all but the last stage."""

    def forward(batches: Iterator[Layout], stage: GPTModel) -> tuple[Tensor, Callable[..., Tensor]]:
        batch = next(batches)
        return logits(stage, batch), partial(_chosen, batch, temperature, vocabulary)

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


def _chosen(layout: Layout, temperature: float, vocabulary: int, out: Tensor, non_loss_data: bool) -> Tensor:
    return token_logprobs(out, layout.targets, temperature, vocabulary, entropy=False)[0]
