"""End to end against TRL's GRPOTrainer on two cores: `python benchmarks/against_trl.py [--pairs 2] [--steps 4]`

The same tiny Qwen3 (hidden 128, 4 layers, vocabulary 512, fp32), the same 110-token prompts, 16 prompts x 8 responses x
128 new tokens, temperature 1, kl_coef 0.04, the same reward, learning rate and optimizer (AdamW, no weight decay). TRL
1.16 runs in an environment of its own, which the script makes once (runs/environments, about 1 GB, by pip). Runs
alternate: TRL, ours with old_policy "behavior", ours with "previous", and again. All responses have full length on both
sides because of the model itself: its end token has a probability of 1e-12 (`out_of_reach`); the lengths of both sides
are checked.

The measure: trained tokens/s, prompt and response tokens of every response over the time from one update's end to the
next; the first steps of a run are dropped. Required: 2.0 times TRL's with "behavior" (which is what TRL computes: ratio
1, no third copy) and 1.7 with "previous" (one model's forward more than TRL).

What was tuned. Ours: one computing thread per process, and how processes share the cores (`--layout`): "one each" is a
trainer on one core and an instance on the other; "two each" (default) a trainer replica and an instance on both, so
that no core waits for the other, and half of the step's groups in flight on each instance, since large batches decode
faster; train.micro_batch_tokens, see LAYOUTS. TRL: two threads; fp32 (bf16, its default, is slower on this CPU); no
gradient checkpointing (it is on by default); micro-batch, cache and generation, see TRL; no vLLM.

Printed besides: where the time goes, and the ceiling: the step if both cores were always busy with nothing but
generation, forward and backward, each at its speed in a sync run of the same layout (where generation and training take
turns). Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import CACHE, run_launcher
from transformers import Qwen3ForCausalLM

from engine.config.recipe import HOME
from engine.run.files import read_lines
from engine.run.trace import read_spans
from engine.tools.quickstart_model.byte_tokenizer import SPECIAL_TOKENS, build
from engine.tools.quickstart_model.warmup import WarmUp, untrained

PACKAGES = ("trl==1.16.0", "torch==2.13.*", "transformers==5.23.*", "accelerate==1.15.*", "datasets==5.2.*")
VOCABULARY = 512
CONTEXT = 512
PROMPTS = 16
GROUP = 8
NEW_TOKENS = 128
PROMPT_TOKENS = 110
RATE = 1e-6
KL = 0.04
WARM_UP = 2
"""First steps of a run, not counted."""
REQUIRED = {"behavior": 2.0, "previous": 1.7}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one each": {
        "train.devices": [0],
        "rollout.devices": [1],
        "rollout.concurrency": 2,
        "train.micro_batch_tokens": 4800,
    },
    "two each": {
        "parallel.data": 2,
        "train.devices": [0, 1],
        "rollout.instances": 2,
        "rollout.devices": [0, 1],
        "rollout.concurrency": 8,
        "train.micro_batch_tokens": 1200,
    },
}
"""A group is 1134 tokens with its prompt once."""
TRL = {"--micro-batch": 32, "--threads": 2}


@dataclass(frozen=True)
class Step:
    """Seconds of one steady step."""

    step_s: float
    parts: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2, help="rounds of TRL and ours")
    parser.add_argument("--steps", type=int, default=4, help="measured steps per run")
    parser.add_argument("--layout", default="two each", choices=list(LAYOUTS), help="of our processes on the two cores")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting of our runs"
    )
    arguments = parser.parse_args()
    python = environment()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(folder / "model")
        problems = make_problems(folder / "problems.jsonl", arguments.steps + WARM_UP)
        found = measure(python=python, model=model, problems=problems, arguments=arguments, folder=folder)
    result = figures(found, LAYOUTS[arguments.layout].get("parallel.data", 1))
    show(found, result)
    print("RESULT " + json.dumps(result))


def measure(
    python: Path, model: Path, problems: Path, arguments: argparse.Namespace, folder: Path
) -> dict[str, list[list[Step]]]:
    """Steady steps of every run, runs alternating: {side: runs}.
    A sync run of each kind at the end, for the ceiling."""
    found: dict[str, list[list[Step]]] = {"trl": [], **{name: [] for name in REQUIRED}}
    count = arguments.steps + WARM_UP
    tuned = LAYOUTS[arguments.layout] | dict(item.split("=", 1) for item in arguments.set)

    def ours(old: str, mode: str, number: int, settings: dict[str, Any]) -> list[Step]:
        named = {"algorithm.old_policy": old, "train.mode": mode, "run.name": f"{old}-{mode}-{number}"}
        return run_ours(model=model, problems=problems, steps=count, folder=folder, changes=settings | named)

    for pair in range(arguments.pairs):
        for side in found:
            steps = run_trl(python, model, problems, count) if side == "trl" else ours(side, "periodic", pair, tuned)
            found[side].append(steps)
            print(
                f"{side} {pair}: {statistics.mean(step.step_s for step in steps):.2f} s a step, "
                f"{tokens_per_s(steps):.0f} tokens/s",
                flush=True,
            )
    return found | {f"{old} sync": [ours(old, "sync", 0, tuned)] for old in REQUIRED}


# what both sides get ------------------------------------------------------------------------------


def make_model(folder: Path) -> Path:
    """A random Qwen3 whose tokenizer is the byte-level one (260 of the 512 ids), as a Hugging Face folder."""
    tokenizer = build(CONTEXT)
    torch.manual_seed(0)
    model = untrained(tokenizer, WarmUp(context=CONTEXT))
    model.resize_token_embeddings(VOCABULARY, mean_resizing=False)
    out_of_reach(model, [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def out_of_reach(model: Qwen3ForCausalLM, ids: list[int], size: float = 4.0) -> None:
    """Take the last hidden dimension as a bias: embeddings have `size` there, those of `ids` −`size`, and no layer
    writes to it.

    With tied embeddings their logits fall by 2 · size² / rms, here by about 22, so that they are never sampled.
    """
    embedding = model.get_input_embeddings().weight
    embedding[:, -1] = size
    embedding[ids, -1] = -size
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[-1] = 0.0
        layer.mlp.down_proj.weight[-1] = 0.0


def make_problems(path: Path, steps: int) -> Path:
    """Different prompts for every step, all of PROMPT_TOKENS letters and spaces: no side has to pad."""
    draw = random.Random(0)
    texts = [
        "".join(draw.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(PROMPT_TOKENS))
        for _ in range(PROMPTS * steps)
    ]
    path.write_text("".join(json.dumps({"problem": text, "answer": "none", "solution": ""}) + "\n" for text in texts))
    return path


# TRL ----------------------------------------------------------------------------------------------


def environment() -> Path:
    """The Python of TRL's own environment; made first if it isn't there or holds other packages."""
    folder = CACHE / "environments/trl"
    python = folder / "bin/python"
    marker = folder / "packages.json"
    if not marker.exists() or json.loads(marker.read_text()) != list(PACKAGES):
        print(f"making TRL's environment in {folder} (a minute or two)", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True, timeout=1800)
        marker.write_text(json.dumps(PACKAGES))
    return python


def run_trl(python: Path, model: Path, problems: Path, steps: int, changes: dict[str, Any] | None = None) -> list[Step]:
    """One run of TRL, with these options of trl_side.py changed; its steady steps."""
    options = {
        "--model": model,
        "--problems": problems,
        "--steps": steps,
        "--prompts": PROMPTS,
        "--group-size": GROUP,
        "--new-tokens": NEW_TOKENS,
        "--learning-rate": RATE,
        "--kl-coef": KL,
        **TRL,
        **(changes or {}),
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
    check_lengths("TRL", report["lengths"])
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


def check_lengths(side: str, means: list[float]) -> None:
    if set(means) != {float(NEW_TOKENS)}:
        sys.exit(
            f"{side}: mean response lengths {means}; only with {NEW_TOKENS} tokens everywhere can the sides be compared"
        )


# ours ---------------------------------------------------------------------------------------------


def run_ours(model: Path, problems: Path, steps: int, folder: Path, changes: dict[str, Any]) -> list[Step]:
    """One run of the launcher; its steady steps."""
    config = run_launcher(
        {
            "run.output": folder,
            "model.path": model,
            "data.train": problems,
            "reward.function": f"{HOME / 'benchmarks/rewards.py'}:letters",
            "rollout.group_size": GROUP,
            "rollout.max_context": PROMPT_TOKENS + NEW_TOKENS + 2,
            "rollout.max_new_tokens": NEW_TOKENS,
            "train.steps": steps,
            "train.prompts_per_step": PROMPTS,
            "train.learning_rate": RATE,
            "train.weight_decay": 0.0,
            "train.max_grad_norm": 1.0,
            "algorithm.kl_coef": KL,
            "checkpoint.every": 0,
            **changes,
        }
    )
    lines = list(read_lines(config.folder / "steps.jsonl"))
    check_lengths("ours", [line["response_length_mean"] for line in lines])
    ends = list(update_ends(read_spans(config.folder / "trace")))
    assert lines[0]["trained_tokens"] == PROMPTS * GROUP * (PROMPT_TOKENS + NEW_TOKENS), lines[0]["trained_tokens"]
    keys = ("rollout_s", "train_s", "score_s", "update_s", "sync_s", "wait_first_s", "wait_s")
    return [
        Step(end - before, {key: line[key] for key in keys})
        for before, end, line in list(zip(ends, ends[1:], lines[1:], strict=False))[WARM_UP - 1 :]
    ]


def update_ends(spans: list[dict[str, Any]]) -> Iterator[float]:
    """When each step's update was done, in order of steps; with several replicas when the last was."""
    ends: dict[int, float] = {}
    for span in spans:
        if span["name"] == "update":
            ends[span["step"]] = max(ends.get(span["step"], 0.0), span["end"])
    return (ends[step] for step in sorted(ends))


# figures ------------------------------------------------------------------------------------------


def tokens_per_s(steps: list[Step]) -> float:
    """Trained tokens per second of wall clock on both cores."""
    return PROMPTS * GROUP * (PROMPT_TOKENS + NEW_TOKENS) * len(steps) / sum(step.step_s for step in steps)


def figures(found: dict[str, list[list[Step]]], cores: int) -> dict[str, Any]:
    """Rates, ratios, ceilings. `cores`: on how many each kind of work is spread."""
    result: dict[str, Any] = {"trl_tokens_per_s": tokens_per_s(sum(found["trl"], []))}
    for old, required in REQUIRED.items():
        rate = tokens_per_s(sum(found[old], []))
        ceiling = core_seconds(found[f"{old} sync"][0], old, cores)
        pairs = [
            tokens_per_s(ours) / tokens_per_s(theirs) for ours, theirs in zip(found[old], found["trl"], strict=True)
        ]
        result[old] = {
            "tokens_per_s": rate,
            "ratio": rate / result["trl_tokens_per_s"],
            "ratio_of_each_pair": pairs,
            "required": required,
            "core_seconds": ceiling,
            "ceiling_tokens_per_s": PROMPTS * GROUP * (PROMPT_TOKENS + NEW_TOKENS) / (sum(ceiling.values()) / 2),
        }
    return result


def core_seconds(sync: list[Step], old: str, cores: int) -> dict[str, float]:
    """What a step's work takes of all cores together;
    the policy's forward is taken to cost what a frozen model's does."""
    frozen = 2 if old == "previous" else 1
    mean = {key: cores * statistics.mean(step.parts[key] for step in sync) for key in sync[0].parts}
    forward = mean["score_s"] / frozen
    return {
        "generation": mean["rollout_s"],
        "forward of frozen models": mean["score_s"],
        "forward of the policy": forward,
        "backward": mean["train_s"] - mean["score_s"] - forward,
        "sync and update": mean["sync_s"] + mean["update_s"],
    }


def show(found: dict[str, list[list[Step]]], result: dict[str, Any]) -> None:
    """For people."""
    print("\nseconds of a step, mean:")
    for side, runs in found.items():
        steps = sum(runs, [])
        parts = ", ".join(f"{key} {statistics.mean(step.parts[key] for step in steps):.2f}" for key in steps[0].parts)
        print(f"  {side}: {statistics.mean(step.step_s for step in steps):.2f} ({parts})")
    for old in REQUIRED:
        one = result[old]
        parts = ", ".join(f"{key} {value:.2f}" for key, value in one["core_seconds"].items())
        print(
            f"{old}: {one['tokens_per_s']:.0f} tokens/s, TRL {result['trl_tokens_per_s']:.0f}: ratio "
            f"{one['ratio']:.2f}, required {one['required']}; ceiling {one['ceiling_tokens_per_s']:.0f} tokens/s "
            f"({one['tokens_per_s'] / one['ceiling_tokens_per_s']:.0%} reached), core-seconds: {parts}"
        )


if __name__ == "__main__":
    main()
