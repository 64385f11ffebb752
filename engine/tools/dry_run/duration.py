"""How long a step takes on this machine's cores, estimated from the model's sizes and the speed of matrix products."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import cache

from engine.config import Config
from engine.config.tree import usable_cores
from engine.model.flops import forward_flops
from engine.model.shape import ModelShape
from engine.run.memory import frozen_copies

MEASURED_S = 0.1
"""CPU seconds for which each kind of matrix product is measured."""
SHARE = 0.5
"""Share of a step's time that matrix products take: the rest are norms, activations, the loss and the update."""
LAYER_S = 2e-4
"""Seconds that a layer takes to start its operations, in a decode step or in a pass over a micro-batch."""
TYPICAL = 0.5
"""Length of a typical response, as a share of rollout.max_new_tokens."""


PRODUCTS = """
import sys, time, numpy
hidden, inner, limit, *sizes = map(float, sys.argv[1:])
other = numpy.ones((int(hidden), int(inner)), "float32")
for rows in sizes:
    one = numpy.ones((int(rows), int(hidden)), "float32")
    count, began = 0, time.process_time()
    while time.process_time() - began < limit:
        one @ other
        count += 1
    print(2 * rows * hidden * inner * count / (time.process_time() - began))
"""
"""Prints the operations per CPU second of one core, for each number of rows."""


@cache
def product_speeds(hidden: int, inner: int, *rows: int) -> list[float]:
    """Floating-point operations per second of fp32 products (rows × hidden) · (hidden × inner) on all cores, measured
    on one of them by CPU time, so that other processes don't count. In a process of its own, where numpy has one
    thread."""
    command = [sys.executable, "-c", PRODUCTS, *map(str, (hidden, inner, MEASURED_S, *rows))]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    told = subprocess.run(command, env=env, capture_output=True, check=True).stdout
    return [len(usable_cores()) * float(speed) for speed in told.split()]


def step_seconds(shape: ModelShape, config: Config, length: float) -> float:
    """Estimated seconds of a step whose responses have `length` tokens on average. Trainer and instances share the
    cores, so their times add up. Prompts are left out: each is computed once for its group."""
    responses = config.train.prompts_per_step * config.rollout.group_size
    forward = forward_flops(shape, 1, length / 2, 1) * length * responses
    slots = max(1, config.rollout.instances) * config.slots
    few, many = product_speeds(shape.hidden, shape.intermediate, min(slots, 256), 512)
    decoded = forward / few
    trained = (3 + frozen_copies(config)) * forward / many
    passes = math.ceil(responses / slots) * length
    passes += (3 + frozen_copies(config)) * math.ceil(responses * length / config.train.micro_batch_tokens)
    return (decoded + trained) / SHARE + passes * shape.layers * LAYER_S


def describe_duration(shape: ModelShape, config: Config) -> str:
    """The estimate in words: for typical and for the longest responses."""
    longest = config.rollout.max_new_tokens
    each, most = (step_seconds(shape, config, length) for length in (TYPICAL * longest, longest))
    steps = config.train.steps
    return (
        f"about {_rounded(each)} a step, {_rounded(each * steps)} in all, if responses have {TYPICAL * longest:g} "
        f"tokens; {_rounded(most)} and {_rounded(most * steps)} if all have {longest:,}; evaluations come on top"
    )


def _rounded(seconds: float) -> str:
    """With two digits, in the unit in which people count so much."""
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{float(f'{seconds / size:.2g}'):g} {unit}"
    return f"{float(f'{seconds:.2g}'):g} s"
