"""The memory sum of the dry run beside a count: `python benchmarks/memory.py [RECIPE …]`

For each recipe one trainer rank of its layout makes two steps on a device that is not there
(benchmarks/fake_device.py), through the trainer's own code and Megatron's. Every tensor on that device is counted from
its making to its end. The window is one micro-batch of `train.micro_batch_tokens`, in groups of the recipe's size.
Attention keeps what fused kernels keep: queries, keys, values, the result, and a number per query and head.

The first and the last rank of the first pipeline stage must call the same collectives in the same order (those of
other stages do not).

The sum is that of `run.dry` (engine/run/memory.py) without its reserve and without the buckets of the weight
sync. Under a pipeline it is that of the first stage.
Default: the papers' recipes without a pipeline. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
import zlib
from typing import Any
from unittest.mock import patch

from common import result

RECIPES = ("gac-qwen3-1.7b", "gac-qwen3-4b", "gac-qwen3-8b", "gac-llama-3.2-3b", "periodic-qwen3-8b-16npu")
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES, help="names in infra/recipes/papers")
    parser.add_argument(
        "--rank", type=int, help="count one recipe in this process, as this rank of the first stage (-1: the last)"
    )
    arguments = parser.parse_args()
    if arguments.rank is not None:
        result(counted(arguments.recipes[0], arguments.rank))
        return
    figures = {}
    print("| recipe | run.dry: GiB | counted: GiB | ratio | collectives: number, same on all ranks |")
    print("|---|---|---|---|---|")
    for recipe in arguments.recipes:
        first, last = (of_rank(recipe, rank) for rank in (0, -1))
        found = figures[recipe] = first | {"same_collectives": first["collectives"] == last["collectives"]}
        print(
            f"| {recipe} | {found['sum']:.2f} | {found['counted']:.2f} | {found['sum'] / found['counted']:.3f} "
            f"| {found['collectives'][0]}, {'yes' if found['same_collectives'] else 'NO'} |"
        )
    result(figures)


def of_rank(recipe: str, rank: int) -> dict[str, Any]:
    """`counted` in a process of its own: torch lets a process name a device once."""
    command = [sys.executable, __file__, recipe, f"--rank={rank}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    return found


def counted(recipe: str, rank: int) -> dict[str, Any]:
    """The sum and the count of a recipe in its second step, in GiB, with the terms of the sum, what is held before the
    step, and what a window adds."""
    warnings.simplefilter("ignore")  # absent Transformer Engine and Apex
    from fake_device import AloneOnTheChannel, FakeNpu, fake_npu

    from engine.config.recipe import load_config
    from engine.run.memory import trainer_need
    from engine.tools.dry_run.model_shape import shape_of
    from engine.trainer.policy import Policy
    from engine.trainer.ranks import models

    config = load_config(f"infra/recipes/papers/{recipe}.toml", [])
    if config.algorithm.gradient_control == "gac":  # would skip updates: every cosine reads as 1
        config = load_config(f"infra/recipes/papers/{recipe}.toml", ["algorithm.gradient_control=measure"])
    shape, _ = shape_of(config.model.path)
    need = trainer_need(shape, config)
    terms = {term.name: term.bytes / GIB for term in need.terms if term.name not in ("reserve", "sync buckets")}
    parallel = config.parallel
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context}
    place = {"rank": rank % (parallel.ranks // parallel.pipeline), "world": parallel.ranks}
    with fake_npu(**place, **sizes) as device, patch.object(models, "read_shape", lambda folder: shape):
        policy = Policy(config, FakeNpu(), AloneOnTheChannel(parallel.lockstep))
        window = groups(config)
        for _ in range(2):  # the optimizer makes its state at the first update
            before = device.held
            device.peak = before
            policy.start_step()
            policy.accumulate(window)
            in_window = device.peak - before
            policy.reduce_gradients(sum(len(group.responses) for group in window))
            policy.control_gradient()
            policy.models.copy_policy_to_old()
            policy.step_optimizer()
        return {
            "sum": sum(terms.values()),
            "counted": device.peak / GIB,
            "at_rest": before / GIB,
            "of_window": in_window / GIB,
            "terms": terms,
            "collectives": [len(device.collectives), zlib.crc32(repr(device.collectives).encode())],
        }


def groups(config: Any) -> list[Any]:  # noqa: ANN401
    """Groups of the recipe's size that fill one micro-batch, or as many as a pipeline has in flight."""
    from engine.config import WINDOW_PER_STAGE
    from engine.tools.acceptance.run_parts import random_group

    size = config.rollout.group_size
    tokens = max(config.train.micro_batch_tokens, config.rollout.max_context)
    longest = config.rollout.max_new_tokens
    prompt = config.rollout.max_context - longest
    length = min(longest, (tokens - prompt) // size)
    stages = config.parallel.pipeline
    count = max(1, tokens // (prompt + size * length)) * (WINDOW_PER_STAGE * stages if stages > 1 else 1)
    return [random_group(prompt=prompt, lengths=[length] * size, vocabulary=1000, seed=seed) for seed in range(count)]


if __name__ == "__main__":
    main()
