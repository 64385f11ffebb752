"""Checks a conversion: `python -m engine.tools.conversion FOLDER [FILE]` prints a JSON line (see ConversionReport), and
writes its progress to FILE.

The Megatron model that is built from a Hugging Face folder must give the logits of the Hugging Face model, and convert
back to identical tensors. The check runs in a separate process, because it sets up Megatron's parallel state.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import BadInput, MetronomeError
from engine.model.shape import ModelShape, content_hash, read_shape
from engine.platform import get_platform, single_session
from engine.run.process import report_errors, watch_lifeline
from engine.run.progress import Progress, write_progress
from engine.wire.weights.hf_folder import Reader, open_folder

TOLERANCE = 1e-4
"""Largest difference of fp32 logits that counts as rounding."""
TOKENS = 64
"""Length of the random text whose logits are compared."""
PAUSE_S = 1.0
"""Seconds between two counts of the tensors that are read."""

Tell = Callable[[str], None]
"""Takes the progress: the part that begins, of four, or a count of its tensors."""


@dataclass(frozen=True)
class ConversionReport:
    """The result of a check. (If the tolerance is exceeded, `check_conversion` raises instead.)"""

    architecture: str
    parameters: int
    content_hash: str
    max_logit_error: float
    round_trip_identical: bool
    weight_bytes: int
    """Size of the converted weights in fp32."""
    peak_bytes: int
    """Peak memory of the process during both conversions, including libraries and weights."""


def check_conversion(folder: Path, tell: Tell = lambda text: None) -> ConversionReport:
    """Build the Megatron model of the folder and compare. Raises BadInput (folder) or MetronomeError (conversion)."""
    shape = read_shape(folder)
    model = _convert(folder, shape, tell)
    _check_round_trip(model, folder, shape, tell)
    peak = get_platform("cpu").peak_bytes()
    sizes = [parameter.numel() for parameter in model.parameters()]
    ids = torch.randint(shape.vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    tell("part 3 of 4: logits of Megatron")
    ours = _ours(model, ids)
    del model  # free it before the next model of this size is built
    tell("part 4 of 4: logits of Hugging Face")
    error = float((ours - _theirs(folder, ids)).abs().max())
    if not error <= TOLERANCE:
        raise MetronomeError(f"{folder}: conversion is wrong: logits differ by {error:.3g} (limit {TOLERANCE:g})")
    return ConversionReport(
        architecture=shape.architecture,
        parameters=sum(sizes),
        content_hash=content_hash(folder),
        max_logit_error=error,
        round_trip_identical=True,
        weight_bytes=4 * sum(sizes),
        peak_bytes=peak,
    )


def _counted(read: Callable[[str], Tensor], total: int, what: str, tell: Tell) -> Callable[[str], Tensor]:
    """A function that reads a tensor by its name with `read`, and also tells how many were read."""
    tell(what)
    done = 0
    last = time.monotonic()

    def counting(name: str) -> Tensor:
        nonlocal done, last
        done += 1
        if time.monotonic() - last > PAUSE_S:
            last = time.monotonic()
            tell(f"{what}, {done} of {total} tensors")
        return read(name)

    return counting


def _convert(folder: Path, shape: ModelShape, tell: Tell) -> torch.nn.Module:
    from engine.model.build import build_model
    from engine.model.hf_weights import load_weights

    model = build_model(shape)
    with open_folder(folder) as files:
        read = _counted(files.read_tensor, len(files.names), "part 1 of 4: into Megatron's layout", tell)
        load_weights(model, read, shape)
    return model


def _check_round_trip(model: torch.nn.Module, folder: Path, shape: ModelShape, tell: Tell) -> None:
    """Check that the model converts back to exactly the tensors of the folder, bit for bit."""
    from engine.model.hf_weights import export_weights

    with open_folder(folder) as files:
        left = set(files.names)
        read = _counted(files.read_tensor, len(left), "part 2 of 4: and back, bit for bit", tell)
        for name, tensor in export_weights(dict(model.named_parameters()), model, shape):
            if not torch.equal(tensor, read(name).float()):
                raise MetronomeError(f"{folder}: conversion is wrong: tensor {name} does not come back unchanged")
            left.remove(name)
        if unknown := sorted(name for name in left if not _redundant(name, files, shape)):
            raise BadInput(
                f"{folder}: tensor {unknown[0]} does not belong to a {shape.architecture}"
                + (f" (nor are {len(unknown) - 1} others)" if unknown[1:] else "")
            )


def _redundant(name: str, files: Reader, shape: ModelShape) -> bool:
    """Whether a tensor repeats information. Some folders contain a tied embedding twice, or the rotary frequencies,
    which follow from config.json."""
    if name == "lm_head.weight" and shape.tied:
        return torch.equal(files.read_tensor(name), files.read_tensor("model.embed_tokens.weight"))
    return name.endswith(".rotary_emb.inv_freq")


def _ours(model: torch.nn.Module, ids: list[int]) -> Tensor:
    from engine.model.build import compute_hidden, output_weight
    from engine.model.layout import make_layout

    with torch.no_grad():
        return compute_hidden(model, make_layout([(ids[:1], [ids[1:]])])) @ output_weight(model).t()


def _theirs(folder: Path, ids: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0, :-1]


def main() -> int:
    """Print the report as JSON. Returns 0, or 2 on bad input, or 1 if the conversion is wrong; the reason is on
    stderr."""
    watch_lifeline()
    folder, *files = map(Path, sys.argv[1:])

    def tell(text: str) -> None:
        for file in files:
            write_progress(file, Progress(text))

    def work() -> None:
        with single_session(get_platform("cpu")):
            print(json.dumps(asdict(check_conversion(folder, tell))))

    return report_errors(work)


if __name__ == "__main__":
    sys.exit(main())
