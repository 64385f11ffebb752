"""Replaces the weights of a running model, bucket by bucket: every parameter exactly once, or the update fails."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.errors import BadInput
from engine.instance.refusals import Conflict

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"

Named = tuple[str, Tensor]


class WeightLoad:
    """One in-place update of a model's parameters."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=True))
        self._tied = model.lm_head.weight is model.model.embed_tokens.weight
        self._head: Tensor | None = None
        self._loaded: set[str] = set()

    @property
    def touched(self) -> bool:
        """Whether any parameter has changed."""
        return bool(self._loaded)

    def lend(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the memory of the parameters with these names, to receive new weights into.

        Returns none until something was loaded, so that a failure of the first bucket leaves the weights unchanged.
        """
        return {name: self._parameters[name].data for name in names if name in self._parameters} if self._loaded else {}

    @torch.no_grad()
    def add(self, tensors: Sequence[Named], cast: bool = False) -> None:
        """Copy tensors, under their Hugging Face names, into the parameters; with `cast`, convert from another dtype if
        needed.

        Raises BadInput, before any parameter is changed, for a tensor that is unknown, a duplicate, or of another shape
        or dtype. A tied output layer may be absent, or equal to the embedding.
        """
        self._check_tensors(tensors, cast)
        for name, tensor in tensors:
            if self._tied and name == OUTPUT:
                self._head = tensor.clone()
            else:
                parameter = self._parameters[name]
                if parameter.data_ptr() != tensor.data_ptr():  # else it was received in place
                    parameter.copy_(tensor)
                self._loaded.add(name)

    def check_whole(self) -> None:
        """Raise Conflict unless every parameter was loaded; BadInput if a tied output layer differs from the
        embedding."""
        if missing := sorted(self._parameters.keys() - self._loaded):
            raise Conflict(f"the weights are incomplete: {len(missing)} tensor(s) missing, the first {missing[0]}")
        if self._head is not None and not torch.equal(
            self._head.to(self._parameters[EMBEDDING].dtype), self._parameters[EMBEDDING]
        ):
            raise BadInput(f"{OUTPUT} differs from {EMBEDDING}, but this model ties them")

    def _check_tensors(self, tensors: Sequence[Named], cast: bool) -> None:
        seen = set(self._loaded)
        for name, tensor in tensors:
            alias = EMBEDDING if self._tied and name == OUTPUT else name
            parameter = self._parameters.get(alias)
            if parameter is None:
                raise BadInput(f"unknown tensor {name}: the model has no such parameter")
            if name in seen:
                raise BadInput(f"{name} was sent twice in one update")
            seen.add(name)
            if tensor.shape != parameter.shape or (tensor.dtype != parameter.dtype and not cast):
                raise BadInput(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, "
                    f"the model's is {parameter.dtype} {list(parameter.shape)}"
                )
        self._check_tied(dict(tensors))

    def _check_tied(self, tensors: dict[str, Tensor]) -> None:
        """Raise BadInput if a tied embedding arrives under both names with different values."""
        if (
            self._tied
            and OUTPUT in tensors
            and EMBEDDING in tensors
            and not torch.equal(tensors[OUTPUT], tensors[EMBEDDING])
        ):
            raise BadInput(f"{OUTPUT} differs from {EMBEDDING}, but this model ties them")
