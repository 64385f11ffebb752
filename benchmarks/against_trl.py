"""Compares Metronome with TRL's GRPOTrainer, end to end on two cores: `python benchmarks/against_trl.py [--pairs 2]
[--steps 4] [--work tiny|smollm2] [--dtype float32|bfloat16] [--bounds]`

Both train the same model with the same prompts, temperature 1, kl_coef 0.04, reward, learning rate and optimizer
(AdamW, no weight decay). "tiny" is a Qwen3 with hidden 128, 4 layers and vocabulary 512, 110-token prompts and 16
prompts x 8 responses x 128 new tokens; "smollm2" is SmolLM2-135M-Instruct (`python -m data.make_smollm2` makes it), 64
tokens and 16 x 4 x 64. TRL 1.16 runs in an environment of its own, which the script makes once (runs/environments,
about 1 GB, by pip). Runs alternate: TRL, Metronome with old_policy "behavior", Metronome with "previous", and again.
All responses have full length on both sides: the tiny model's end token has a probability of 1e-12 (`out_of_reach`),
and SmolLM2 gets one that it never learned. The lengths of both sides are checked.

The measure is trained tokens/s: prompt and response tokens of every response, over the time from the end of one update
to the end of the next. The first steps of a run do not count. With "behavior" Metronome computes the same as TRL (ratio
1, no third copy); with "previous" it computes one forward pass more.

These settings were tuned for "tiny". Metronome: one computing thread per process, train.micro_batch_tokens (see WORKS),
and the use of the cores (`--layout`). "one each" is a trainer on one core and an instance on the other. "two each"
(default) is a trainer replica and an instance on each core, so that no core waits for the other, and half of the step's
groups in flight on each instance, because large batches decode faster. TRL: two threads; no gradient checkpointing (it
is on by default); micro-batch, cache and generation (`--trl OPTION=VALUE` changes them); no vLLM. `--dtype` is that of
both sides; `--trl dtype=float32` is TRL's alone.

The output also shows the parts of a step's time, and three bounds. The ceiling is the speed if both cores were always
busy with generation, forward and backward, each at its speed in a sync run of the same layout (in which generation and
training take turns). The bound of one large product is the time of the step's matrix products at that product's speed
on both cores. Products of a step are slower: they have as many rows as there are responses or tokens of a micro-batch,
and their weights come from memory. The bound of the step's products is the time of these products alone, each by the
fastest way that torch has (`products_s`). `--bounds` measures only these two. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import CACHE, QUICKSTART_MODEL, byte_tokenizer, run_orchestrator
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from engine.config.recipe import HOME
from engine.run.files import read_lines
from engine.run.trace import read_spans

PACKAGES = ("trl==1.16.0", "torch==2.13.*", "transformers==5.23.*", "accelerate==1.15.*", "datasets==5.2.*")
RATE = 1e-6
KL = 0.04
CORES = 2
COLD = 1 << 26
"""Bytes of factors that are multiplied in turn, more than a core's own caches hold."""
WARM_UP = 2
"""Number of first steps of a run that do not count."""
OLD_POLICIES = ("behavior", "previous")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one each": {"train.devices": [0], "rollout.devices": [1]},
    "two each": {
        "parallel.data": 2,
        "train.devices": [0, 1],
        "rollout.instances": 2,
        "rollout.devices": [0, 1],
    },
}
FROZEN = {"behavior": 1, "previous": 2}
"""Forward passes of frozen models in a step, by algorithm.old_policy: the reference, and the old policy."""


@dataclass(frozen=True)
class Work:
    """What both sides train, and how."""

    make: Callable[[Path], Path]
    """Writes the model's folder."""
    make_prompt: Callable[[random.Random], str]
    """A prompt of `prompt_tokens` tokens, so that no side needs padding."""
    prompt_tokens: int
    prompts: int
    group: int
    new_tokens: int
    layouts: dict[str, dict[str, Any]]
    """Our settings, by layout."""
    trl: dict[str, Any]
    """Options of trl_side.py."""

    @property
    def tokens(self) -> int:
        """Trained tokens of a step: prompt and response of every response."""
        return self.prompts * self.group * (self.prompt_tokens + self.new_tokens)

    @property
    def computed_tokens(self) -> int:
        """The same if a group's prompt counts once."""
        return self.prompts * (self.prompt_tokens + self.group * self.new_tokens)


@dataclass(frozen=True)
class Step:
    """Seconds of one steady step."""

    step_s: float
    parts: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2, help="rounds of TRL and ours")
    parser.add_argument("--steps", type=int, default=4, help="measured steps per run")
    parser.add_argument("--work", default="tiny", choices=list(WORKS))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--layout", default="two each", choices=list(LAYOUTS), help="of our processes on the two cores")
    parser.add_argument("--trl", action="append", default=[], metavar="OPTION=VALUE", help="of trl_side.py")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting of our runs"
    )
    parser.add_argument("--bounds", action="store_true", help="measure only the bounds of the machine")
    arguments = parser.parse_args()
    work = WORKS[arguments.work]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = work.make(folder / "model")
        limits = bounds(work=work, model=model, dtype=getattr(torch, arguments.dtype), layout=arguments.layout)
        if arguments.bounds:
            print("RESULT " + json.dumps(limits))
            return
        problems = make_problems(work, folder / "problems.jsonl", arguments.steps + WARM_UP)
        found = measure(python=environment(), model=model, problems=problems, arguments=arguments, folder=folder)
    result = figures(work, found, work.layouts[arguments.layout].get("parallel.data", 1))
    for old in OLD_POLICIES:
        result[old] |= limits[old]
    show(found, result)
    print("RESULT " + json.dumps(result))


def measure(
    python: Path, model: Path, problems: Path, arguments: argparse.Namespace, folder: Path
) -> dict[str, list[list[Step]]]:
    """The steady steps of every run, by side; the runs alternate. At the end there is a sync run of each kind, for the
    ceiling."""
    found: dict[str, list[list[Step]]] = {"trl": [], **{name: [] for name in OLD_POLICIES}}
    count = arguments.steps + WARM_UP
    work = WORKS[arguments.work]
    typed = {"model.dtype": arguments.dtype, "train.dtype": arguments.dtype}
    typed |= {"train.ratio_gap_limit": 0.0} if arguments.dtype == "bfloat16" else {}
    tuned = work.layouts[arguments.layout] | typed | dict(item.split("=", 1) for item in arguments.set)
    theirs = {"--dtype": arguments.dtype} | {f"--{name}": value for name, value in map(parted, arguments.trl)}

    def ours(old: str, mode: str, number: int, settings: dict[str, Any]) -> list[Step]:
        named = {"algorithm.old_policy": old, "train.mode": mode, "run.name": f"{old}-{mode}-{number}"}
        return run_ours(work=work, model=model, problems=problems, steps=count, folder=folder, changes=settings | named)

    for pair in range(arguments.pairs):
        for side in found:
            if side == "trl":
                steps = run_trl(work=work, python=python, model=model, problems=problems, steps=count, changes=theirs)
            else:
                steps = ours(side, "periodic", pair, tuned)
            found[side].append(steps)
            print(
                f"{side} {pair}: {statistics.mean(step.step_s for step in steps):.2f} s a step, "
                f"{tokens_per_s(work, steps):.0f} tokens/s",
                flush=True,
            )
    return found | {f"{old} sync": [ours(old, "sync", 0, tuned)] for old in OLD_POLICIES}


def parted(setting: str) -> list[str]:
    """Name and value of NAME=VALUE."""
    return setting.split("=", 1)


# what both sides get ------------------------------------------------------------------------------


def make_tiny(folder: Path) -> Path:
    """A random Qwen3 whose tokenizer is the byte-level one (260 of the 512 ids), as a Hugging Face folder."""
    tokenizer = byte_tokenizer(512)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(QUICKSTART_MODEL, max_position_embeddings=512))
    model.generation_config = GenerationConfig.from_pretrained(QUICKSTART_MODEL)
    model.resize_token_embeddings(512, mean_resizing=False)
    out_of_reach(model, [tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def out_of_reach(model: Qwen3ForCausalLM, ids: list[int], size: float = 4.0) -> None:
    """Lower the logits of `ids` so far that they are never sampled.

    The last hidden dimension becomes a bias: embeddings have `size` there, those of `ids` have −`size`, and no layer
    writes to it. With tied embeddings the logits of `ids` fall by 2 · size² / rms, here by about 22.
    """
    embedding = model.get_input_embeddings().weight
    embedding[:, -1] = size
    embedding[ids, -1] = -size
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[-1] = 0.0
        layer.mlp.down_proj.weight[-1] = 0.0


def copy_smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct with an end token that it has never seen, so that it samples none."""
    source = HOME / "data/smollm2"
    if not source.exists():
        subprocess.run([sys.executable, "-m", "data.make_smollm2", str(source)], cwd=HOME, check=True)
    shutil.copytree(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.eos_token = "<reponame>"
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    generation = GenerationConfig.from_pretrained(source)
    generation.eos_token_id = tokenizer.eos_token_id
    generation.save_pretrained(folder)
    return folder


def make_letters(draw: random.Random) -> str:
    """110 letters and spaces, a token each in the tiny model."""
    return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(110))


def make_words(draw: random.Random) -> str:
    """64 words that are a token each in SmolLM2."""
    words = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "with", "as", "was", "on", "are", "by", "this")
    return "".join(f" {draw.choice(words)}" for _ in range(64))


def make_problems(work: Work, path: Path, steps: int) -> Path:
    """Different prompts for every step."""
    draw = random.Random(0)
    texts = [work.make_prompt(draw) for _ in range(work.prompts * steps)]
    path.write_text("".join(json.dumps({"problem": text, "answer": "none", "solution": ""}) + "\n" for text in texts))
    return path


# TRL ----------------------------------------------------------------------------------------------


def environment() -> Path:
    """The Python of TRL's environment, which is made first if it is missing or has other packages."""
    folder = CACHE / "environments/trl"
    python = folder / "bin/python"
    marker = folder / "packages.json"
    if not marker.exists() or json.loads(marker.read_text()) != list(PACKAGES):
        print(f"making TRL's environment in {folder} (a minute or two)", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True, timeout=1800)
        marker.write_text(json.dumps(PACKAGES))
    return python


def run_trl(work: Work, python: Path, model: Path, problems: Path, steps: int, changes: dict[str, Any]) -> list[Step]:
    """Run TRL once; returns its steady steps. `changes`: options of trl_side.py."""
    options = {
        "--model": model,
        "--problems": problems,
        "--steps": steps,
        "--prompts": work.prompts,
        "--group-size": work.group,
        "--new-tokens": work.new_tokens,
        "--learning-rate": RATE,
        "--kl-coef": KL,
        **work.trl,
        **changes,
    }
    command = [
        str(python),
        str(HOME / "benchmarks/trl_side.py"),
        *(str(part) for pair in options.items() for part in pair),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": str(options["--threads"]), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("TRL ")]
    if done.returncode or not lines:
        sys.exit(f"TRL's run failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    report = json.loads(lines[0].removeprefix("TRL "))
    check_lengths(work, "TRL", report["lengths"])
    return [
        Step(
            step["step_s"],
            {
                "generation": step["generate_s"],
                "forward of the reference": step["score_s"],
                "the rest (forward, backward, update)": step["step_s"] - step["generate_s"] - step["score_s"],
            },
        )
        for step in report["steps"][WARM_UP:]
    ]


def check_lengths(work: Work, side: str, means: list[float]) -> None:
    if set(means) != {float(work.new_tokens)}:
        wanted = f"only with {work.new_tokens} tokens everywhere can the sides be compared"
        sys.exit(f"{side}: mean response lengths {means}; {wanted}")


# ours ---------------------------------------------------------------------------------------------


def run_ours(work: Work, model: Path, problems: Path, steps: int, folder: Path, changes: dict[str, Any]) -> list[Step]:
    """Run the orchestrator once; returns its steady steps."""
    config = run_orchestrator(
        {
            "run.output": folder,
            "model.path": model,
            "data.train": problems,
            "reward.function": f"{HOME / 'benchmarks/rewards.py'}:letters",
            "rollout.group_size": work.group,
            "rollout.max_context": work.prompt_tokens + work.new_tokens + 2,
            "rollout.max_new_tokens": work.new_tokens,
            "train.steps": steps,
            "train.prompts_per_step": work.prompts,
            "train.learning_rate": RATE,
            "train.weight_decay": 0.0,
            "train.max_grad_norm": 1.0,
            "algorithm.kl_coef": KL,
            "checkpoint.every": 0,
            **changes,
        }
    )
    lines = list(read_lines(config.folder / "steps.jsonl"))
    check_lengths(work, "ours", [line["response_length_mean"] for line in lines])
    ends = list(update_ends(read_spans(config.folder / "trace")))
    assert lines[0]["trained_tokens"] == work.tokens, lines[0]["trained_tokens"]
    keys = ("rollout_s", "train_s", "score_s", "update_s", "sync_s", "wait_first_s", "wait_s")
    return [
        Step(end - before, {key: line[key] for key in keys})
        for before, end, line in list(zip(ends, ends[1:], lines[1:], strict=False))[WARM_UP - 1 :]
    ]


def update_ends(spans: list[dict[str, Any]]) -> Iterator[float]:
    """The end of each step's update, in order of steps; with several replicas that of the last one."""
    ends: dict[int, float] = {}
    for span in spans:
        if span["name"] == "update":
            ends[span["step"]] = max(ends.get(span["step"], 0.0), span["end"])
    return (ends[step] for step in sorted(ends))


# figures ------------------------------------------------------------------------------------------


def tokens_per_s(work: Work, steps: list[Step]) -> float:
    """Trained tokens per second of wall clock on both cores."""
    return work.tokens * len(steps) / sum(step.step_s for step in steps)


def figures(work: Work, found: dict[str, list[list[Step]]], cores: int) -> dict[str, Any]:
    """Rates, ratios and ceilings. `cores`: the number of cores on which each kind of work runs."""
    result: dict[str, Any] = {"trl_tokens_per_s": tokens_per_s(work, sum(found["trl"], []))}
    for old in OLD_POLICIES:
        rate = tokens_per_s(work, sum(found[old], []))
        ceiling = core_seconds(found[f"{old} sync"][0], old, cores)
        pairs = [
            tokens_per_s(work, ours) / tokens_per_s(work, theirs)
            for ours, theirs in zip(found[old], found["trl"], strict=True)
        ]
        result[old] = {
            "tokens_per_s": rate,
            "ratio": rate / result["trl_tokens_per_s"],
            "ratio_of_each_pair": pairs,
            "core_seconds": ceiling,
            "ceiling_tokens_per_s": work.tokens / (sum(ceiling.values()) / 2),
        }
    return result


def core_seconds(sync: list[Step], old: str, cores: int) -> dict[str, float]:
    """Core-seconds of the parts of a step. The policy's forward pass is assumed to cost as much as a frozen model's."""
    mean = {key: cores * statistics.mean(step.parts[key] for step in sync) for key in sync[0].parts}
    forward = mean["score_s"] / FROZEN[old]
    return {
        "generation": mean["rollout_s"],
        "forward of frozen models": mean["score_s"],
        "forward of the policy": forward,
        "backward": mean["train_s"] - mean["score_s"] - forward,
        "sync and update": mean["sync_s"] + mean["update_s"],
    }


Maps = list[tuple[int, int]]
"""(inputs, outputs) of linear maps."""


def bounds(work: Work, model: Path, dtype: torch.dtype, layout: str) -> dict[str, dict[str, Any]]:
    """The bounds in tokens/s, and the core-seconds of the step's products, by old policy.

    A group's prompt counts once. Attention is left out.
    """
    torch.set_num_threads(1)
    maps, head = linear_maps(model)
    large = product_s(2048, 2048, 2048, dtype, cold=False) / (2 * 2048**3)
    multiplied = sum(inputs * outputs for inputs, outputs in [*maps, head])
    parts = products_s(work=work, maps=maps, head=head, dtype=dtype, settings=work.layouts[layout])
    found = {}
    for old, frozen in FROZEN.items():
        spent = {
            "generation": parts["generation"],
            "forward of frozen models": frozen * parts["forward"],
            "forward of the policy": parts["forward"],
            "backward": parts["backward"],
        }
        found[old] = {
            "bound_tokens_per_s": work.tokens
            / ((2 + 2 * frozen + 6) * multiplied * work.computed_tokens * large / CORES),
            "products_tokens_per_s": work.tokens / (sum(spent.values()) / CORES),
            "products_core_seconds": spent,
        }
    return found


def linear_maps(model: Path) -> tuple[Maps, tuple[int, int]]:
    """The maps of all layers of a Llama or Qwen3, with those of equal input joined, and that of the output layer."""
    config = AutoConfig.from_pretrained(model)
    hidden = config.hidden_size
    dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    own = config.num_attention_heads * dim
    layer = [
        (hidden, own + 2 * config.num_key_value_heads * dim),
        (own, hidden),
        (hidden, 2 * config.intermediate_size),
        (config.intermediate_size, hidden),
    ]
    return config.num_hidden_layers * layer, (hidden, config.vocab_size)


def products_s(
    work: Work, maps: Maps, head: tuple[int, int], dtype: torch.dtype, settings: dict[str, Any]
) -> dict[str, float]:
    """Core-seconds of a step's products, by part: of generation, one forward pass and one backward pass.

    Each is computed with the rows that it has in a run, by one thread, and reads its weights from memory: those of all
    layers are multiplied in turn.
    """
    instances = settings.get("rollout.instances", 1)
    together = min(settings["rollout.concurrency"], -(-work.prompts // instances))
    decoded = instances * -(-work.prompts // (instances * together)) * (work.new_tokens - 1)
    groups = max(1, settings["train.micro_batch_tokens"] // (work.prompt_tokens + work.group * work.new_tokens))
    batches = work.prompts / groups
    rows = groups * (work.prompt_tokens + work.group * work.new_tokens)
    scored = groups * work.group * work.new_tokens
    trained = [(rows, *one) for one in maps] + [(scored, *head)]
    found = {
        "generation": decoded * sum(product_s(together * work.group, *one, dtype) for one in [*maps, head])
        + work.prompts * sum(product_s(work.prompt_tokens, *one, dtype) for one in maps),
        "forward": batches * sum(product_s(*sizes, dtype) for sizes in trained),
    }
    found["backward"] = batches * sum(
        product_s(tokens, outputs, inputs, dtype) + product_s(outputs, tokens, inputs, dtype)
        for tokens, inputs, outputs in trained
    )
    return found


@cache
def product_s(rows: int, inputs: int, outputs: int, dtype: torch.dtype, cold: bool = True) -> float:
    """CPU seconds of a product x · weightᵀ with x [rows, inputs], by the fastest way that torch has.

    `cold`: whether the weights come from memory rather than from a cache.
    """
    x = torch.randn(rows, inputs).to(dtype)
    count = max(1, COLD // (inputs * (rows + outputs) * dtype.itemsize)) if cold else 1
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
    ordered = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    ways: list[Callable[[], object]] = [
        lambda: [x @ weight.t() for weight in weights],
        lambda: [torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "") for weight in weights],
        lambda: [torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "") for weight in ordered],
    ]
    return min(fastest(way) for way in ways) / count


def fastest(way: Callable[[], object]) -> float:
    """Least CPU seconds of some calls, after one that warms up."""
    taken = []
    for _ in range(4):
        started = time.thread_time()
        way()
        taken.append(time.thread_time() - started)
    return min(taken[1:])


def show(found: dict[str, list[list[Step]]], result: dict[str, Any]) -> None:
    """Print the result as text."""
    print("\nseconds of a step, mean:")
    for side, runs in found.items():
        steps = sum(runs, [])
        parts = ", ".join(f"{key} {statistics.mean(step.parts[key] for step in steps):.2f}" for key in steps[0].parts)
        print(f"  {side}: {statistics.mean(step.step_s for step in steps):.2f} ({parts})")
    for old in OLD_POLICIES:
        one = result[old]
        parts, products = (
            ", ".join(f"{key} {value:.2f}" for key, value in one[name].items())
            for name in ("core_seconds", "products_core_seconds")
        )
        print(
            f"{old}: {one['tokens_per_s']:.0f} tokens/s, TRL {result['trl_tokens_per_s']:.0f}: ratio "
            f"{one['ratio']:.2f}; ceiling {one['ceiling_tokens_per_s']:.0f} tokens/s "
            f"({one['tokens_per_s'] / one['ceiling_tokens_per_s']:.0%} reached), bound of the step's products "
            f"{one['products_tokens_per_s']:.0f} ({one['tokens_per_s'] / one['products_tokens_per_s']:.0%}), of one "
            f"large product {one['bound_tokens_per_s']:.0f} ({one['tokens_per_s'] / one['bound_tokens_per_s']:.0%}); "
            f"core-seconds: {parts}; of the products alone: {products}"
        )


def sized(**sizes: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """The layouts with (rollout.concurrency, train.micro_batch_tokens) of each."""
    keys = ("rollout.concurrency", "train.micro_batch_tokens")
    return {name: LAYOUTS[name] | dict(zip(keys, sizes[name.split()[0]], strict=True)) for name in LAYOUTS}


WORKS = {
    "tiny": Work(
        make=make_tiny,
        make_prompt=make_letters,
        prompt_tokens=110,
        prompts=16,
        group=8,
        new_tokens=128,
        layouts=sized(one=(2, 4800), two=(8, 1200)),  # a group has 1134 tokens
        trl={"--micro-batch": 32, "--threads": 2},
    ),
    "smollm2": Work(
        make=copy_smollm2,
        make_prompt=make_words,
        prompt_tokens=64,
        prompts=16,
        group=4,
        new_tokens=64,
        layouts=sized(one=(8, 1280), two=(8, 640)),  # a group has 320 tokens
        trl={"--micro-batch": 16, "--threads": 2},
    ),
}


if __name__ == "__main__":
    main()
