"""How many kernels a trainer rank starts on an accelerator, and how often the host waits for it: `python
benchmarks/launches.py [--against OTHER_CHECKOUT]`

The trainer's step of a dense model in bf16 runs on a device that is not there (benchmarks/fake_device.py): no time is
measured. (A mixture of experts is left out: how many tokens each expert gets are data, which that device has not.) A
window of two micro-batches is trained under old policy and reference; then the update is made. Printed are

* syncs per window: where the host waits for the device within `Policy.accumulate`;
* syncs per update: likewise within `reduce` and `update`;
* operators per layer: those of a forward and backward pass of one layer (the difference of models that differ by one
  layer), without those that only make views;
* bytes per layer and token: what these operators read and write; each tensor of an operator counts whole;
* operators per window and update: those of both micro-batches, and of the update.

`--against` measures another checkout of this repository too. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import random_qwen3, result

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--waits", action="store_true", help="print the lines of code where the host waits")
    arguments = parser.parse_args()
    after = measured(arguments.waits)
    figures: dict[str, Any] = dict(after)
    if arguments.against:
        figures["before"] = of_checkout(arguments.against)
    for name, value in after.items():
        before = f" (before: {figures['before'][name]})" if arguments.against else ""
        print(f"{name}: {value}{before}")
    result(figures)


def of_checkout(checkout: Path) -> dict[str, Any]:
    """The figures of another checkout, measured by this script."""
    done = subprocess.run(
        [sys.executable, str(HERE / "launches.py")],
        env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    return found


def measured(show: bool) -> dict[str, Any]:
    """The figures of the engine that Python finds."""
    warnings.simplefilter("ignore")  # absent Transformer Engine and Apex
    from fake_device import fake_npu

    with tempfile.TemporaryDirectory() as folder, fake_npu() as device:
        more, policy = kernels(device, Path(folder), layers=3)
        fewer, _ = kernels(device, Path(folder), layers=2)
        policy.start_step()
        device.clear()
        policy.accumulate(window())
        waits = Counter(device.waits)
        in_window = sum(device.kernels.values())
        device.clear()
        policy.reduce_gradients(2 * GROUP)
        policy.step_optimizer()
        if show:
            for wait, count in (*waits.items(), *Counter(device.waits).items()):
                print(f"{count} × {wait}")
        return {
            "syncs_per_window": sum(waits.values()),
            "syncs_per_update": len(device.waits),
            "operators_per_layer": more[0] - fewer[0],
            "bytes_per_layer_and_token": round((more[1] - fewer[1]) / ROW),
            "operators_per_window": in_window,
            "operators_per_update": sum(device.kernels.values()),
        }


PROMPT = 16
LENGTHS = [9, 20, 3, 14]
GROUP = len(LENGTHS)
ROW = PROMPT + sum(LENGTHS)
"""Tokens of a micro-batch."""


def window() -> Sequence[Any]:
    """Two groups, each a micro-batch of its own."""
    from engine.tools.acceptance.run_parts import random_group

    return [random_group(prompt=PROMPT, lengths=LENGTHS, vocabulary=512, seed=index) for index in range(2)]


def kernels(device: Any, folder: Path, layers: int) -> tuple[tuple[int, int], Any]:  # noqa: ANN401
    """The number of operators that one micro-batch starts, the bytes that they move, and the policy that did."""
    from fake_device import FakeNpu

    from engine.config.recipe import load_config
    from engine.trainer.micro_batches import micro_batches
    from engine.trainer.policy import Policy

    model = random_qwen3(folder / str(layers), hidden=128, layers=layers, vocabulary=512, context=1024)
    settings = {
        "model.path": model,
        "run.output": folder,
        "algorithm.old_policy": "previous",
        "algorithm.kl_coef": 0.01,
        "train.dtype": "bfloat16",
        "train.ratio_gap_limit": 0,
        "train.micro_batch_tokens": 64,
        "rollout.group_size": GROUP,
        "rollout.max_context": 512,
    }
    policy = Policy(load_config("infra/recipes/quickstart.toml", [f"{k}={v}" for k, v in settings.items()]), FakeNpu())
    policy.start_step()
    scored = policy._frozen_scores(micro_batches(window()[:1], policy.packing, policy.group_advantages))
    device.clear()
    policy._forward_backward(iter(scored), 1)
    return (sum(device.kernels.values()), device.moved), policy


if __name__ == "__main__":
    main()
