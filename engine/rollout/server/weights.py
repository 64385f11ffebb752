"""Replacing the weights of a running model by those of safetensors files: all or nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.errors import BadInput


def load_weights(model: nn.Module, path: str) -> None:
    """Copy the tensors of a file, or of a folder's *.safetensors (one per pipeline stage of the trainer), under their
    Hugging Face names, into the model's parameters in place.

    Every parameter must be there exactly once with its shape and dtype, and nothing else; a tied lm_head may be absent
    or equal to the embedding. Anything else raises BadInput before a single parameter is touched.
    """
    place = Path(path)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files or not files[0].is_file():
        raise BadInput(f"update_info.path {path!r}: no such file, and no folder with *.safetensors")
    parameters = dict(model.named_parameters(remove_duplicate=True))
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read(file)
    _check_tied(model, tensors, path)
    _check(parameters, tensors, path)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise BadInput(f"update_info.path {str(path)!r}: not a whole safetensors file: {error}") from None


def _check_tied(model: nn.Module, tensors: dict[str, Tensor], path: str) -> None:
    """Take out the second name of a tied embedding."""
    embedding = tensors.get("model.embed_tokens.weight")
    if model.lm_head.weight is not model.model.embed_tokens.weight or "lm_head.weight" not in tensors:
        return
    head = tensors.pop("lm_head.weight")
    if embedding is None or not torch.equal(head, embedding):
        raise BadInput(f"{path}: lm_head.weight differs from model.embed_tokens.weight, but this model ties them")


def _check(parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor], path: str) -> None:
    missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    if missing or unknown:
        raise BadInput(f"{path}: " + "; ".join(
            f"{what} {len(names)} tensor(s), the first {names[0]}"
            for what, names in (("missing", missing), ("unknown", unknown)) if names))
    for name, parameter in parameters.items():
        found = tensors[name]
        if found.shape != parameter.shape or found.dtype != parameter.dtype:
            raise BadInput(f"{path}: {name} is {found.dtype} {list(found.shape)}, "
                           f"the model's is {parameter.dtype} {list(parameter.shape)}")
