"""The tri-model: policy, old policy and reference in one layout on the same ranks (Periodic Asynchrony §4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from engine.model.build import build_model, logits
from engine.model.layout import Layout
from engine.model.logprobs import token_logprobs
from engine.model.shape import ModelShape
from engine.model.weights import load_hf, to_hf


class TriModel:
    """The policy and its frozen copies, as far as the algorithm needs them."""

    def __init__(self, shape: ModelShape, base: Path, reference: Path | None, old: bool, temperature: float) -> None:
        """Load the policy from a Hugging Face folder; `reference` from its own, or None for kl_coef = 0."""
        self.shape = shape
        self.temperature = temperature
        self.policy = build_model(shape)
        load_hf(self.policy, base, shape)
        self.old = _frozen(shape, base) if old else None
        self.reference = _frozen(shape, reference) if reference is not None else None

    def copy_policy_to_old(self) -> None:
        """Move the policy's weights into the old policy's (Algorithm 1, line 20); nothing without an old policy."""
        if self.old is not None:
            copy_weights(self.policy, self.old)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The policy as (Hugging Face name, tensor) pairs, each a contiguous copy on the host."""
        parameters = {name: parameter.detach() for name, parameter in self.policy.named_parameters()}
        for name, tensor in to_hf(parameters.__getitem__, self.shape):
            yield name, tensor.contiguous().clone()


@torch.no_grad()
def score(model: torch.nn.Module, layout: Layout, temperature: float) -> Tensor:
    """[T] log-probabilities of the layout's response tokens under a frozen model."""
    return token_logprobs(logits(model, layout), layout.targets, temperature)[0]


@torch.no_grad()
def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy parameters between models of one shape."""
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        ours.copy_(theirs)


def _frozen(shape: ModelShape, folder: Path) -> GPTModel:
    model = build_model(shape)
    load_hf(model, folder, shape)
    return model.requires_grad_(False).eval()
