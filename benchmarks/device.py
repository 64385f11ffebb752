"""Measures a training micro-step on one device: `python benchmarks/device.py --device cuda|npu [--shapes 0.6b 1.7b]
[--prompt 1024] [--response 1024]`

Needs torch and megatron-core only (with npu also torch_npu and MindSpeed). It has run on an H200, not on an NPU.
First the kernels and the model are compared with their references, as `metronome doctor --device` does; `--tiny` stops
there, and has run with `--device cpu`.

Then, in bf16, a micro-step (forward, loss, backward) of models of Qwen3-0.6B's and 1.7B's shapes with random weights is
timed: one group, shared prompt on and off. Tokens/s counts prompt and response of every response, even if the prompt
was computed once. Model FLOP utilisation counts the operations of the computed tokens, over the device's dense bf16
peak (engine/model/flops.py). Activations are kept, or layers are recomputed with `--recompute`
(recomputation does not count).

Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs without installation

from engine import platform
from engine.errors import BadInput
from engine.model.flops import micro_step, peak_of
from engine.platform.base import Accelerator
from engine.tools.acceptance.comparisons import TINY, build, chosen, comparisons, random_groups
from engine.tools.acceptance.device_parts import exact_matmuls

SHAPES = {
    "0.6b": replace(
        TINY, layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocabulary=151936
    ),
    "1.7b": replace(
        TINY, layers=28, hidden=2048, heads=16, kv_heads=8, head_dim=128, intermediate=6144, vocabulary=151936
    ),
}
"""The published sizes of Qwen3-0.6B and Qwen3-1.7B."""


def main() -> None:
    arguments = parse()
    try:
        machine = platform.get_platform(arguments.device)
    except BadInput as error:
        raise SystemExit(f"error: {error}") from None
    exact_matmuls(machine)
    with platform.single_session(machine) as device:
        name = machine.device_name(0)
        figures: dict[str, Any] = {"device": name, "torch": torch.__version__}
        figures["correctness"] = correctness(machine.attention, device)
        if not arguments.tiny:
            peak = arguments.peak_tflops * 1e12 if arguments.peak_tflops else peak_of(name)
            figures["speed"] = [
                speed(name=name, machine=machine, device=device, arguments=arguments, shared=shared, peak=peak)
                for name in arguments.shapes
                for shared in (True, False)
            ]
    print("RESULT " + json.dumps(figures))


def correctness(attention: str, device: torch.device) -> list[dict[str, Any]]:
    """The figures of all comparisons. Raises SystemExit if one exceeds its limit."""
    found = []
    for _, compare in comparisons(attention, device):
        for comparison in compare():
            print(comparison, flush=True)
            found.append(comparison)
    if wrong := [str(comparison) for comparison in found if not comparison.right]:
        raise SystemExit(f"error: {'; '.join(wrong)}")
    return [comparison.figures() for comparison in found]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "npu", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="correctness only")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--recompute",
        nargs="?",
        const=True,
        default=False,
        type=lambda text: int(text) if text.isdigit() else text,
        metavar="selective|N",
        help='as train.recompute: all layers, "selective", or N layers',
    )
    parser.add_argument("--peak-tflops", type=float, help="peak of the device in bf16 (default: by its name, if known)")
    return parser.parse_args()


def speed(
    name: str,
    machine: platform.Platform,
    device: torch.device,
    arguments: argparse.Namespace,
    shared: bool,
    peak: float | None,
) -> dict[str, Any]:
    """Median seconds of a micro-step, with tokens/s and FLOP utilisation."""
    shape = SHAPES[name]
    model = build(
        shape=shape, attention=machine.attention, device=device, dtype=torch.bfloat16, recompute=arguments.recompute
    )
    groups = random_groups(arguments.prompt, [arguments.response] * arguments.group, shape.vocabulary)
    if isinstance(machine, Accelerator):
        machine.api().reset_peak_memory_stats()
    seconds = timed(lambda: (-chosen(model, groups, shared).mean()).backward(), machine, arguments.repeats)
    trained = arguments.group * (arguments.prompt + arguments.response)
    needed = micro_step(
        sizes=shape, prompt=arguments.prompt, response=arguments.response, group=arguments.group, shared=shared
    )
    found = {
        "shape": name,
        "shared_prompt": shared,
        "seconds": seconds,
        "tokens_per_s": trained / seconds,
        "model_flop_utilisation": needed / seconds / peak if peak else None,
        "peak_bytes": machine.peak_bytes(),
    }
    print(found, flush=True)
    return found


def timed(call: Callable[[], None], machine: platform.Platform, repeats: int) -> float:
    """Median wall seconds of a call. The first two calls (compilation) do not count."""
    taken = []
    for _ in range(repeats + 2):
        machine.synchronize()
        started = time.perf_counter()
        call()
        machine.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])


if __name__ == "__main__":
    main()
