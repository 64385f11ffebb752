"""Compares the trainer's micro-step with Hugging Face's forward and backward: `python benchmarks/train_throughput.py
[--repeats 5]`

Both sides have the same samples of native length, the same loss (ratio 1, so its gradient is that of −A · mean log π
over the response's tokens), fp32, one thread and a random Qwen3. Hugging Face computes one sample at a time without
padding (sdpa attention, logits of the response's positions only), which is its fastest exact way for samples of unequal
length. The trainer's side is `Policy.accumulate`:

* one sample per micro-batch, on samples of 128 to 512 tokens;
* packed into micro-batches of `--budget` tokens, on a mixed batch of short samples of 16 to 96 tokens.

No prompt is shared: both sides compute every sample as a whole. The gradients of both are compared before the timing.
Calls alternate. The figures are medians of CPU seconds with one computing thread. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from common import alternating, build_policy, gradients, one_rank, random_qwen3, result
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.tools.acceptance.run_parts import random_group
from engine.types import Group

PROMPT = 8
"""Number of tokens of every sample that are not trained."""
GROUP = 8
CASES = {"one sample per micro-batch": (24, 128, 512), "packed, short samples": (128, 16, 96)}
"""Samples, and the tokens of the shortest and of the longest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each side")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument(
        "--samples", type=int, help="of each case, instead of " + " and ".join(str(c[0]) for c in CASES.values())
    )
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a packed micro-batch")
    arguments = parser.parse_args()
    figures = {
        "hidden": arguments.hidden,
        "layers": arguments.layers,
        "vocabulary": arguments.vocabulary,
        "dtype": "float32",
        "threads": 1,
        "budget": arguments.budget,
    }
    print(
        f"Qwen3, hidden {arguments.hidden}, {arguments.layers} layers, vocabulary {arguments.vocabulary}, float32, 1 "
        f"thread, torch {torch.__version__}"
    )
    with tempfile.TemporaryDirectory() as folder, one_rank():
        model = random_qwen3(Path(folder) / "model", arguments.hidden, arguments.layers, arguments.vocabulary)
        for name, (count, *case) in CASES.items():
            budget = arguments.budget if name.startswith("packed") else 1
            case = (arguments.samples or count, *case)
            figures[name] = measure(
                name=name,
                model=model,
                case=case,
                vocabulary=arguments.vocabulary,
                budget=budget,
                repeats=arguments.repeats,
            )
    result(figures)


def measure(
    name: str, model: Path, case: tuple[int, int, int], vocabulary: int, budget: int, repeats: int
) -> dict[str, float]:
    """Tokens/s of both sides on one set of samples."""
    count, shortest, longest = case
    groups = samples(count, shortest, longest, vocabulary)
    tokens = sum(PROMPT + len(response.token_ids) for group in groups for response in group.responses)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    ours = build_policy(model, shared_prompt=False, micro_batch_tokens=budget)
    ours.start_step()
    ours.accumulate(groups)
    hugging_face(theirs, groups)
    compare(gradients(ours), {name: parameter.grad for name, parameter in theirs.named_parameters()})
    sides = {"ours": partial(ours.accumulate, groups), "hugging_face": partial(hugging_face, theirs, groups)}
    times = alternating(sides, repeats)
    rates = {side: tokens / statistics.median(taken) for side, taken in times.items()}
    ratio = rates["ours"] / rates["hugging_face"]
    print(
        f"{name}: {count} samples of {shortest} to {longest} tokens ({tokens}): ours {rates['ours']:.0f} tokens/s, "
        f"Hugging Face {rates['hugging_face']:.0f}: ratio {ratio:.2f}",
        flush=True,
    )
    return {
        "ours_tokens_per_s": rates["ours"],
        "hugging_face_tokens_per_s": rates["hugging_face"],
        "ratio": ratio,
        "samples": count,
        "tokens": tokens,
    }


def samples(count: int, shortest: int, longest: int, vocabulary: int) -> list[Group]:
    """Groups of one response. The length of prompt and response together is uniform in shortest … longest."""
    draw = random.Random(0)
    lengths = [draw.randint(shortest, longest) - PROMPT for _ in range(count)]
    return [random_group(PROMPT, lengths[i : i + GROUP], vocabulary, seed=i) for i in range(0, count, GROUP)]


def hugging_face(model: PreTrainedModel, groups: list[Group]) -> None:
    """Forward and backward of each sample by itself; gradients add up."""
    for group in groups:
        rewards = torch.tensor([score.value for score in group.scores])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for advantage, response in zip(advantages, group.responses, strict=True):
            ids = torch.tensor([*group.prompt.token_ids, *response.token_ids])
            count = len(response.token_ids)
            logits = model(ids[None], logits_to_keep=count + 1, use_cache=False).logits[0, :-1]
            logs = logits.log_softmax(-1).gather(-1, ids[-count:, None])
            (-advantage * logs.mean()).backward()


def compare(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Exit with an error unless both sides have computed the same gradients."""
    for name, gradient in theirs.items():
        difference = float(torch.norm(ours[name] - gradient) / torch.norm(gradient))
        if not difference < 1e-4:
            raise SystemExit(f"gradients differ, {name}: relative norm of the difference {difference:.1e}")


if __name__ == "__main__":
    main()
