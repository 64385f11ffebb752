"""The gain in training from computing a group's prompt once.

`python benchmarks/shared_prompt.py [--repeats 3] [--hidden 512]`

A micro-step is `Policy.accumulate` of one group in one micro-batch: the policy's forward, loss and backward. It is
timed with `attention.shared_prompt` on and off. With it off, every response has its own copy of the prompt, and all of
them are *packed* into one row without padding, which is the fastest way without sharing. The model is a random fp32
Qwen3 (by default hidden 512, 4 layers, 8 heads of 64, 4 key-value heads, MLP 1536, vocabulary 4096), large enough that
kernels cost more than calls. Calls alternate. The figures are medians of CPU seconds with one computing thread.

The bound is the ratio of the floating-point operations of both sides, by the formula of
engine/model/flops.py. Peak memory is the largest resident size of a fresh process in such a micro-step,
minus its size before. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from common import alternating, build_policy, one_rank, random_qwen3, reset_peak, result

from engine import platform
from engine.model.flops import micro_step
from engine.model.shape import ModelShape, read_shape
from engine.tools.acceptance.run_parts import random_group

POINTS = ((1024, 64, 8), (512, 256, 8), (128, 1024, 8))
"""(prompt, response, group) in tokens, tokens, responses."""
VOCABULARY = 4096
SIDES = {"shared": True, "packed": False}


def main() -> None:
    arguments = parse()
    if arguments.memory:
        side, *point = arguments.memory.split(",")
        print(json.dumps(peak(Path(arguments.model), SIDES[side], tuple(map(int, point)))))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = random_qwen3(Path(folder) / "model", arguments.hidden, arguments.layers, VOCABULARY)
        shape = read_shape(model)
        print(
            f"Qwen3, hidden {shape.hidden}, {shape.layers} layers, {shape.heads} heads of {shape.head_dim}, vocabulary "
            f"{shape.vocabulary}, float32, 1 thread, torch {torch.__version__}"
        )
        found = [measure(model, shape, point, arguments.repeats) for point in arguments.points]
    result(
        {
            "hidden": shape.hidden,
            "layers": shape.layers,
            "vocabulary": VOCABULARY,
            "dtype": "float32",
            "threads": 1,
            "points": found,
        }
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each side")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--points", nargs="+", type=as_point, default=POINTS, help="prompt,response,group of each")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)  # "side,prompt,response,group" in a fresh process
    return parser.parse_args()


def as_point(text: str) -> tuple[int, int, int]:
    """A point from the command line: three numbers."""
    prompt, response, group = map(int, text.split(","))
    return prompt, response, group


def measure(model: Path, shape: ModelShape, point: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """Seconds and peak memory of both sides at one point, with the bound."""
    prompt, response, size = point
    group = random_group(prompt, [response] * size, VOCABULARY)
    with one_rank():
        policies = {side: build_policy(model, shared, size * (prompt + response)) for side, shared in SIDES.items()}
        for policy in policies.values():
            policy.start_step()
        times = alternating({side: partial(policy.accumulate, [group]) for side, policy in policies.items()}, repeats)
    seconds = {side: statistics.median(taken) for side, taken in times.items()}
    work = {side: micro_step(shape, *point, shared) for side, shared in SIDES.items()}
    speed_up = seconds["packed"] / seconds["shared"]
    bound = work["packed"] / work["shared"]
    memory = {side: peak_of_process(model, side, point) for side in SIDES}
    print(
        f"prompt {prompt}, response {response}, group {size}: shared {seconds['shared']:.2f} s, packed "
        f"{seconds['packed']:.2f} s: {speed_up:.2f} times faster, bound {bound:.2f} ({speed_up / bound:.0%} of it); "
        f"peak memory shared {memory['shared'] / 2**20:.0f} MiB, packed {memory['packed'] / 2**20:.0f} MiB",
        flush=True,
    )
    return {
        "prompt": prompt,
        "response": response,
        "group": size,
        "shared_s": seconds["shared"],
        "packed_s": seconds["packed"],
        "speed_up": speed_up,
        "bound": bound,
        "share_of_bound": speed_up / bound,
        "shared_gflop_per_s": work["shared"] / seconds["shared"] / 1e9,
        "packed_gflop_per_s": work["packed"] / seconds["packed"] / 1e9,
        "shared_peak_bytes": memory["shared"],
        "packed_peak_bytes": memory["packed"],
    }


def peak_of_process(model: Path, side: str, point: tuple[int, int, int]) -> int:
    """Peak memory of a micro-step in bytes, measured in a process of its own."""
    command = [sys.executable, __file__, "--model", str(model), "--memory", ",".join(map(str, (side, *point)))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return int(json.loads(done.stdout.splitlines()[-1]))


def peak(model: Path, shared: bool, point: tuple[int, ...]) -> int:
    """Largest resident size during one micro-step minus the size before it, in bytes. A tiny micro-step before has
    loaded all code."""
    prompt, response, size = point
    with one_rank():
        policy = build_policy(model, shared, size * (prompt + response))
        policy.start_step()
        policy.accumulate([random_group(8, [8] * 2, VOCABULARY)])
        before = psutil.Process().memory_info().rss
        reset_peak(platform.get_platform("cpu"))
        policy.accumulate([random_group(prompt, [response] * size, VOCABULARY)])
        return platform.get_platform("cpu").peak_bytes() - before


if __name__ == "__main__":
    main()
