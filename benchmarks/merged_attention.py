"""The attention kernels that run on a CPU side by side, forward and backward, for rows with a shared prompt.

`python benchmarks/merged_attention.py [--repeats 5]`

- mask: one call of torch's attention with the plain mask (`reference.masked_attention`)
- cpu: the kernel of the platform cpu (`cpu.attend`)
- merged: the prompt part and the own part merged, each in plain operations of torch (`merged.attend` with `Plain`). It
  is what the kernels of devices are compared with, and no kernel to train with: it holds the scores of a sequence.

8 heads of 64, 4 key-value heads, fp32, one computing thread. Calls alternate. The figures are medians of CPU seconds,
and peak memory of a fresh process minus its size before. Ratios are to cpu. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
from common import alternating, reset_peak, result

from engine import platform
from engine.config.recipe import HOME
from engine.model.kernels import KERNELS, Kernel
from engine.model.kernels.merged import attend
from engine.model.layout import make_layout

sys.path.insert(0, str(HOME / "tests"))
from support.plain_kernel import Plain  # noqa: E402

POINTS = ("1024,64,8", "512,256,8", "128,1024,8")
"""Prompt and response in tokens, and responses."""
KINDS: dict[str, Kernel] = {
    "mask": KERNELS["reference"],
    "cpu": KERNELS["cpu"],
    "merged": partial(attend, kernel=Plain),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each kernel")
    parser.add_argument("--points", nargs="+", default=POINTS, help="prompt,response,group of each")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)  # the kernel and the point, in a fresh process
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print(peak(*arguments.memory))
        return
    points = [measure(point, arguments.repeats) for point in arguments.points]
    result({"heads": 8, "kv_heads": 4, "width": 64, "dtype": "float32", "threads": 1, "points": points})


def measure(point: str, repeats: int) -> dict[str, Any]:
    """Seconds and peak bytes of every kernel at one point."""
    times = alternating({name: step(kernel, point) for name, kernel in KINDS.items()}, repeats)
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    memory = {name: peak_of_process(name, point) for name in KINDS}
    for name in KINDS:
        print(
            f"{point} {name}: {seconds[name]:.3f} s ({seconds[name] / seconds['cpu']:.2f} of cpu), "
            f"{memory[name] / 2**20:.0f} MiB ({memory[name] / memory['cpu']:.2f} of cpu)",
            flush=True,
        )
    return {
        "point": point,
        "seconds": seconds,
        "bytes": memory,
        "seconds_to_cpu": {name: seconds[name] / seconds["cpu"] for name in KINDS},
        "bytes_to_cpu": {name: memory[name] / memory["cpu"] for name in KINDS},
    }


def step(kernel: Kernel, point: str) -> Callable[[], None]:
    """A forward and backward pass over one group of random tensors."""
    prompt, response, size = map(int, point.split(","))
    row = make_layout([([0] * prompt, [[0] * response] * size)])
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(row.size, heads, 64, generator=draw).requires_grad_() for heads in (8, 4, 4))
    weight = torch.randn(q.shape, generator=draw)

    def run() -> None:
        torch.autograd.grad(kernel(q, k, v, row, None), (q, k, v), weight)

    return run


def peak_of_process(name: str, point: str) -> int:
    """Peak memory of a step in bytes, measured in a process of its own."""
    command = [sys.executable, __file__, "--memory", name, point]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return int(json.loads(done.stdout.splitlines()[-1]))


def peak(name: str, point: str) -> int:
    """Largest resident size during one step minus the size before it, in bytes."""
    step(KINDS[name], "8,8,2")()
    run = step(KINDS[name], point)
    before = psutil.Process().memory_info().rss
    reset_peak(platform.get_platform("cpu"))
    run()
    return platform.get_platform("cpu").peak_bytes() - before


if __name__ == "__main__":
    main()
