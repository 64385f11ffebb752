"""Measures what the comparison of fixed tokens after a weight sync sees: the smallest change of an instance's weights.

`python benchmarks/sync_detection.py [--model DIR] [--data FILE] [--tokens N]...` gives the same weights to the trainer
(Megatron) and to another engine (transformers), in fp32 and in bf16. What they differ by is the noise, from which the
orchestrator's own rule makes the limit. Then a part of the other engine's weights gets a random change of a relative
size (norm of the change over norm of the tensor): one layer, half of one matrix (a tensor-parallel slice), or a bucket
of tensors in a row. The detection limit is the smallest size, in steps of √2, at which 99 % of the changes are above
the limit. Wrong weights of another kind are tried too: the matrix of the layer before, and zeros. Last line: RESULT
{json}.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from common import QUICKSTART_MODEL, one_rank, result
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import platform
from engine.config.inputs import Data
from engine.config.recipe import HOME, load_config
from engine.data.problems import read_problems
from engine.data.prompts import encode_problems
from engine.data.tokenizer import Tokenizer
from engine.orchestrator.publish.probe import Probe, make_probe
from engine.trainer.ranks.models import open_models
from engine.wire.weights.buckets import DTYPES

TRIALS = 100
SEEN = 0.99
SIZES = tuple(2 ** (-half / 2) for half in range(0, 33))
"""Relative sizes of a change, from 1 downwards."""
BUCKET_TENSORS = 8
Change = Callable[[random.Random, float], Iterator[tuple[Tensor, Tensor]]]
"""(draw, size) → the views of weights to change, and their changed values."""


def main() -> None:
    """Print a table for each dtype and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: the quickstart's model")
    parser.add_argument("--data", default=str(HOME / "data/addition_train.jsonl"), help="whose prompts are the text")
    parser.add_argument("--template", default="{problem}", help='"chat", or a text with {problem}')
    parser.add_argument("--tokens", type=int, action="append", help="of the probe; may be repeated (default 16)")
    parser.add_argument("--trials", type=int, default=TRIALS)
    arguments = parser.parse_args()
    model = arguments.model or QUICKSTART_MODEL
    text = [token for one in prompts(model, arguments.data, arguments.template) for token in one]
    figures = {}
    for dtype in ("float32", "bfloat16"):
        for count in arguments.tokens or [16]:
            figures[f"{dtype}, {count} tokens"] = measure(
                model=model, dtype=dtype, text=text, count=count, trials=arguments.trials
            )
    result(figures)


def prompts(model: Path, data: str, template: str) -> list[Sequence[int]]:
    """The token ids of the prompts, as a run has them."""
    tokenizer = Tokenizer(model)
    encoded = encode_problems(read_problems(data), tokenizer, Data(prompt_template=template), 2048)
    return [prompt.token_ids for prompt in encoded.prompts]


def measure(model: Path, dtype: str, text: list[int], count: int, trials: int) -> dict[str, float]:
    """Noise, limit, and detection limits by the kind of change."""
    settings = [
        "rollout.engine=vllm",
        "algorithm.old_policy=behavior",
        "algorithm.kl_coef=0.0",
        "train.ratio_gap_limit=0",
    ]
    config = load_config(None, [f"model.path={model}", f"train.dtype={dtype}", f"model.dtype={dtype}", *settings])
    with one_rank():
        trainer = open_models(config, platform.get_platform("cpu"))
        fixed = make_probe(vocabulary=trainer.shape.vocabulary, count=count, max_context=2048, dtype=dtype, text=text)
        assert fixed is not None
        ours = trainer.probe(fixed.token_ids)
        del trainer
    other = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype]).eval().requires_grad_(False)
    noise = fixed.difference(ours, logprobs(other, fixed))
    limit = fixed.limit(noise)
    print(f"{dtype}, {count} tokens: noise {noise:.3g}, limit {limit:.3g}")

    def seen(change: Change, number: int, size: float) -> bool:
        with changed(change(random.Random(number), size)):
            return not fixed.difference(ours, logprobs(other, fixed)) <= limit

    found = {"noise": noise, "limit": limit}
    for name, change in sized(other).items():
        found[name] = detection_limit(partial(seen, change), trials)
        print(f"  {name}: a relative change of {found[name]:.2g} is seen")
    for name, change in wrong(other).items():
        found[name] = sum(seen(change, number, 1.0) for number in range(trials)) / trials
        print(f"  {name}: seen in {found[name]:.0%} of {trials}")
    return found


def logprobs(model: PreTrainedModel, fixed: Probe) -> list[float]:
    """Those of the probe's tokens but the first, as an engine computes them: log-softmax in fp32."""
    ids = torch.tensor([fixed.token_ids])
    rows = model(ids).logits[0, :-1].float().log_softmax(-1)
    return [float(value) for value in rows.gather(1, ids[0, 1:, None])[:, 0]]


def detection_limit(seen: Callable[[int, float], bool], trials: int) -> float:
    """The smallest of SIZES at which SEEN of the trials are seen, found by bisection; inf if they are not at the
    largest."""
    low = 0  # the number of SIZES, from the largest on, at which enough are seen: at least so many
    high = len(SIZES)
    while low < high:
        middle = (low + high) // 2
        if _enough(seen, SIZES[middle], trials):
            low = middle + 1
        else:
            high = middle
    return SIZES[low - 1] if low else math.inf


def _enough(seen: Callable[[int, float], bool], size: float, trials: int) -> bool:
    missed = 0
    for number in range(trials):
        missed += not seen(number, size)
        if missed > round((1 - SEEN) * trials, 9):
            return False
    return True


@contextmanager
def changed(changes: Iterator[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Have the weights these values meanwhile."""
    kept = []
    for view, value in list(changes):
        kept.append((view, view.clone()))
        view.copy_(value)
    try:
        yield
    finally:
        for view, before in kept:
            view.copy_(before)


def noisy(view: Tensor, size: float, seed: int) -> tuple[Tensor, Tensor]:
    """The view, and its values with a random change of that relative norm. In bf16 it is rounded as weights are."""
    drawn = torch.randn(view.shape, generator=torch.Generator().manual_seed(seed))
    whole = view.float()
    return view, (whole + drawn * (size * whole.norm() / drawn.norm())).to(view.dtype)


def sized(model: PreTrainedModel) -> dict[str, Change]:
    """Kinds of changes that have a size."""
    layers = [list(layer.parameters()) for layer in model.model.layers]
    matrices = [tensor for layer in layers for tensor in layer if tensor.dim() == 2]
    tensors = list(model.parameters())

    def layer(draw: random.Random, size: float) -> Iterator[tuple[Tensor, Tensor]]:
        yield from (noisy(tensor, size, draw.getrandbits(32)) for tensor in draw.choice(layers))

    def half(draw: random.Random, size: float) -> Iterator[tuple[Tensor, Tensor]]:
        yield noisy(draw.choice(draw.choice(matrices).chunk(2)), size, draw.getrandbits(32))

    def bucket(draw: random.Random, size: float) -> Iterator[tuple[Tensor, Tensor]]:
        first = draw.randrange(len(tensors) - BUCKET_TENSORS)
        yield from (noisy(one, size, draw.getrandbits(32)) for one in tensors[first : first + BUCKET_TENSORS])

    return {"one layer": layer, "half of one matrix": half, f"{BUCKET_TENSORS} tensors in a row": bucket}


def wrong(model: PreTrainedModel) -> dict[str, Change]:
    """Kinds of wrong weights."""
    layers = [[tensor for tensor in layer.parameters() if tensor.dim() == 2] for layer in model.model.layers]

    def neighbour(draw: random.Random, size: float) -> Iterator[tuple[Tensor, Tensor]]:
        here = draw.randrange(1, len(layers))
        number = draw.randrange(len(layers[here]))
        yield layers[here][number], layers[here - 1][number].clone()

    def zeros(draw: random.Random, size: float) -> Iterator[tuple[Tensor, Tensor]]:
        half = draw.choice(draw.choice(draw.choice(layers)).chunk(2))
        yield half, torch.zeros_like(half)

    return {"a matrix of the layer before": neighbour, "half of a matrix is zero": zeros}


if __name__ == "__main__":
    main()
