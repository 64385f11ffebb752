"""Checks a conversion: `python -m engine.model.convert FOLDER` prints one JSON line (see ConversionReport).

The Megatron model built from a Hugging Face folder must give the Hugging Face model's logits and convert back to the
very same tensors. Runs in a process of its own, because it sets up Megatron's parallel state.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import BadInput, MetronomeError
from engine.model.shape import ModelShape, content_hash, read_shape
from engine.platform import cpu
from engine.process import watch_lifeline

TOLERANCE = 1e-4
"""Largest difference of fp32 logits that is rounding."""


@dataclass(frozen=True)
class ConversionReport:
    """What was found; `check` raises instead when a tolerance is broken."""

    architecture: str
    parameters: int
    content_hash: str
    max_logit_error: float
    round_trip_identical: bool


def check(folder: Path) -> ConversionReport:
    """Build the Megatron model of the folder and compare. Raises BadInput (folder) or MetronomeError (conversion)."""
    from engine.model.build import build_model
    from engine.model.weights import load_hf

    shape = read_shape(folder)
    model = build_model(shape)
    load_hf(model, folder, shape)
    ids = torch.randint(shape.vocabulary, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    error = float((_ours(model, ids) - _theirs(folder, ids)).abs().max())
    identical = _round_trip(model, folder, shape)
    if not error <= TOLERANCE or not identical:
        raise MetronomeError(f"{folder}: conversion is wrong: logits differ by {error:.3g} (limit {TOLERANCE:g}), "
                             f"round trip identical: {identical}")
    count = sum(parameter.numel() for parameter in model.parameters())
    return ConversionReport(shape.architecture, count, content_hash(folder), error, identical)


def _ours(model: torch.nn.Module, ids: list[int]) -> Tensor:
    from engine.model.build import logits
    from engine.model.layout import layout

    with torch.no_grad():
        return logits(model, layout([(ids[:1], [ids[1:]])]))


def _theirs(folder: Path, ids: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0, :-1]


def _round_trip(model: torch.nn.Module, folder: Path, shape: ModelShape) -> bool:
    from engine.model.weights import open_hf, to_hf

    ours = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with open_hf(folder) as files:
        return all(torch.equal(tensor, files.read(name)) for name, tensor in to_hf(ours.__getitem__, shape))


def main() -> int:
    """Print the report as JSON; 2 on bad input, 1 when the conversion is wrong, with the reason on stderr."""
    watch_lifeline()
    try:
        with cpu.single_process():
            print(json.dumps(asdict(check(Path(sys.argv[1])))))
    except MetronomeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
