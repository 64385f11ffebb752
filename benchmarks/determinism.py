"""The cost of determinism: the embedded engine with `rollout.deterministic` off and on, on the quickstart's workload.

`python benchmarks/determinism.py [--model DIR]` samples the same prompts in groups of 8 with both settings in turn, and
compares tokens per CPU-second. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from common import QUICKSTART_MODEL

from engine.config.recipe import load_config
from engine.data.problems import read_problems
from engine.data.prompts import encode_problems
from engine.data.tokenizer import Tokenizer
from engine.instance.embedded.engine import Engine, Result, SamplingRequest
from engine.instance.embedded.rollout_model import RolloutModel
from engine.instance.protocol import Sampling
from engine.types import Prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: the quickstart's base model)")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config("infra/recipes/quickstart.toml")
    model = arguments.model or QUICKSTART_MODEL
    tokenizer = Tokenizer(model)
    problems = read_problems(config.data.sets[0].path)
    prompts = encode_problems(problems, tokenizer, config.data, config.rollout.max_context).prompts[:32]
    slots = config.slots
    rates: dict[bool, list[float]] = {False: [], True: []}
    with torch.inference_mode():
        loaded = RolloutModel(model, config.rollout.max_context)
        engines = {flag: Engine(loaded, slots, config.rollout.max_context, deterministic=flag) for flag in rates}
        for round_number in range(arguments.rounds + 1):
            for flag, engine in engines.items():
                rate = sample(
                    engine=engine,
                    prompts=prompts,
                    group_size=config.rollout.group_size,
                    limit=config.rollout.max_new_tokens,
                    stop=tokenizer.stop_ids,
                )
                if round_number:  # the first round warms up
                    rates[flag].append(rate)
    free, fixed = (statistics.median(rates[flag]) for flag in (False, True))
    print(
        f"{slots} slots, context {config.rollout.max_context}: {free:.0f} tokens per CPU-second, deterministic "
        f"{fixed:.0f}; determinism costs {1 - fixed / free:.0%}"
    )
    result = {
        "tokens_per_cpu_s": free,
        "deterministic_tokens_per_cpu_s": fixed,
        "cost": 1 - fixed / free,
        "slots": slots,
        "max_context": config.rollout.max_context,
    }
    print("RESULT " + json.dumps(result))


def sample(engine: Engine, prompts: tuple[Prompt, ...], group_size: int, limit: int, stop: tuple[int, ...]) -> float:
    """Generate a group for each prompt; returns sampled tokens per CPU-second."""
    done: list[Result] = []
    for prompt in prompts:
        for number in range(group_size):
            sampling = Sampling(limit, seed=number, stop_ids=frozenset(stop))
            engine.submit(SamplingRequest(prompt.token_ids, sampling, done.append))
    started = time.process_time()
    while engine.busy:
        engine.step()
    return sum(len(result.token_ids) for result in done) / (time.process_time() - started)


if __name__ == "__main__":
    main()
