"""The set-ups of two papers as `metronome plan` sees them. `python benchmarks/planner_papers.py`

Every second is a prior: arithmetic for an assumed device with assumed efficiencies, lengths and batches; the papers
state few of them. So this compares orders and ratios, and reproduces nothing.

* Periodic Asynchrony, Table 1: sync and periodic on 16 NPUs, tokens per second and device.
* Periodic Asynchrony, Table 3: periodic on 16, 32 and 64 NPUs.
* AsyncFlow, Table 1 (7B on 512 NPUs): one task after the other, overlapped within an iteration, delayed by a step.
* AsyncFlow, §4.2.2 and §8: weights that instances take all at once, or one instance after the other (sub-step update).
  `--sub-step` prints only this table.

Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from common import result

from engine.config import Config
from engine.config.placing import count_devices
from engine.config.recipe import load_config
from engine.tools.planner.costs import DEVICES
from engine.tools.planner.lengths import Lengths
from engine.tools.planner.planning import StepModel, find_plan, prior_model
from engine.tools.planner.simulation import Simulated, simulate_run

RECIPES = "infra/recipes/papers"
SEEDS = 2
KEPT = 12
"""Settings that are simulated for the planner's own choice."""


@dataclass(frozen=True)
class Setup:
    """A row of a paper's table."""

    name: str
    recipe: str
    published: float
    """The paper's figure; the first row of a table is 1."""
    keys: dict[str, Any] = field(default_factory=dict)
    """What differs from the recipe."""


@dataclass(frozen=True)
class Table:
    """A table of a paper."""

    name: str
    rows: Sequence[Setup]
    mean: float
    p99: float
    """Tokens of a response."""
    assumed: str
    """What the paper does not say, beside the recipe's comments."""


TABLES = (
    Table(
        name="Periodic Asynchrony, Table 1: tokens/s/device",
        rows=(
            Setup("sync", "periodic-qwen3-8b-16npu-paper.toml", 1.0, {"train.mode": "sync"}),
            Setup("periodic", "periodic-qwen3-8b-16npu-paper.toml", 192.259 / 99.966),
        ),
        mean=8700,
        p99=14336,
        assumed="1,024 responses of 8,961 trained tokens a step (917.6 M in 100 steps), so 8,700 of a response; the "
        "longest of 16k context; Ascend 910B",
    ),
    Table(
        name="Periodic Asynchrony, Table 3: tokens/s/device",
        rows=(
            Setup("16 NPUs", "periodic-qwen3-8b-16npu-paper.toml", 1.0),
            Setup("32 NPUs", "periodic-qwen3-8b-32npu-paper.toml", 171.824 / 188.162),
            Setup("64 NPUs", "periodic-qwen3-8b-64npu-paper.toml", 163.208 / 188.162),
        ),
        mean=8700,
        p99=14336,
        assumed="as above; the batch grows with the trainer's replicas or not, as the recipes have it",
    ),
    Table(
        name="AsyncFlow, Table 1: normalized throughput, 7B on 512 NPUs",
        rows=tuple(
            Setup(
                name,
                "asyncflow-qwen2.5-7b-32npu.toml",
                published,
                {"train.mode": mode, "parallel.data": 128, "dry_run.joining": 128, "train.prompts_per_step": 4096}
                | {"platform.devices": 512, "weights.staged": mode == "one_step_off", "train.recompute": False},
            )
            for name, mode, published in (
                ("one task at a time", "sync", 1.0),
                ("with the queue", "periodic", 2.01),
                ("and asynchronous", "one_step_off", 2.74),
            )
        ),
        mean=2000,
        p99=6144,
        assumed="no batch, length, layout or device is stated: 4,096 prompts × 8, 2,000 tokens, half of the devices "
        "train, Ascend 910B",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(DEVICES), default="910b")
    parser.add_argument(
        "--no-search", dest="search", action="store_false", help="leave out what the planner would choose"
    )
    parser.add_argument("--sub-step", action="store_true", help="only the table of the sub-step update")
    arguments = parser.parse_args()
    tables = () if arguments.sub_step else TABLES
    found = [compared(table, arguments.device, arguments.search) for table in tables]
    result({"device": arguments.device, "tables": found, "sub_step": sub_step(arguments.device)})


def compared(table: Table, device: str, search: bool) -> dict[str, Any]:
    """Print and return a table: published and predicted ratios, and what they rest on."""
    print(f"\n{table.name}\nassumed: {table.assumed}")
    rows = []
    unit = 0.0
    for setup in table.rows:
        model = model_of(setup, table, device)
        tokens = tokens_per_s_per_device(model)
        unit = unit or tokens
        rows.append({"setup": setup.name, "published": setup.published, "predicted": tokens / unit})
        print(f"{setup.name:20} published {setup.published:5.2f}  predicted {tokens / unit:5.2f}  ({tokens:,.0f})")
    print("\n".join(f"  {name}: {source}" for name, source in model.assumptions.items()))
    by = {key: [row["setup"] for row in sorted(rows, key=lambda row: row[key])] for key in ("published", "predicted")}
    told = {"table": table.name, "rows": rows, "same_order": by["published"] == by["predicted"]}
    return told | ({"choice": choice(model)} if search else {})


SUB_STEP = "asyncflow-qwen2.5-7b-32npu.toml"
WAYS = {
    "one_step_off": ("one_step_off", False),
    "one_step_off, staged": ("one_step_off", True),
    "bounded 1": ("bounded", False),
    "bounded 1, staged": ("bounded", True),
}
"""Mode and weights.staged. In the last one the instances swap one after the other."""
INSTANCES = (4, 6, 8, 10)
LONG = 6
"""Simulated steps: an order of the instances needs some to settle."""


def sub_step(device: str) -> list[dict[str, Any]]:
    """Print and return seconds of a step and mean staleness, by the number of instances beside AsyncFlow's trainer for
    7B on 32 NPUs."""
    table = TABLES[-1]
    print(
        f"\nAsyncFlow, §4.2.2: {SUB_STEP}, responses of {table.mean:,} tokens, 99 % below {table.p99:,}; seconds of a "
        "step (mean staleness)"
    )
    print("| instances | " + " | ".join(WAYS) + " |\n" + "|---" * (1 + len(WAYS)) + "|")
    rows = []
    for instances in INSTANCES:
        found = {}
        for way, (mode, staged) in WAYS.items():
            keys = {"train.mode": mode, "train.max_staleness": 1, "weights.staged": staged, "train.recompute": False}
            model = model_of(Setup(way, SUB_STEP, 0.0, keys | {"dry_run.joining": instances}), table, device)
            runs = [
                simulate_run(model.config, model.costs_of(model.config), lengths=model.lengths, seed=seed, steps=LONG)
                for seed in range(2 * SEEDS)
            ]
            found[way] = {"step_s": fmean(run.step_s for run in runs), "staleness": fmean(map(staleness, runs))}
        cells = (f"{one['step_s']:.0f} ({one['staleness']:.2f})" for one in found.values())
        print(f"| {instances} | " + " | ".join(cells) + " |")
        rows.append({"instances": instances, **found})
    return rows


def staleness(run: Simulated) -> float:
    """Mean number of updates by which the weights that sampled a response are older than those that it trains."""
    return fmean(span["step"] - span["version"] for span in run.spans if span["name"] == "rollout" and span["step"] > 1)


def model_of(setup: Setup, table: Table, device: str) -> StepModel:
    """The step model of a row, by arithmetic alone."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in setup.keys.items()]
    config = load_config(f"{RECIPES}/{setup.recipe}", overrides)
    lengths = Lengths.drawn(
        table.mean, table.p99, min(512, config.rollout.max_context // 8), config.rollout.max_new_tokens
    )
    return prior_model(config, DEVICES[device], lengths)


def tokens_per_s_per_device(model: StepModel) -> float:
    """Trained tokens (prompts and responses) per second and device, by simulation."""
    config = model.config
    costs = model.costs_of(config)
    seconds = fmean(simulate_run(config, costs, model.lengths, seed).step_s for seed in range(SEEDS))
    return trained_tokens(config, model.lengths) / seconds / count_devices(config)


def trained_tokens(config: Config, lengths: Lengths) -> float:
    """Mean tokens of a step's batch, each response with its prompt."""
    responses = config.train.prompts_per_step * config.rollout.group_size
    return responses * (lengths.mean_prompt + lengths.mean)


def choice(model: StepModel) -> dict[str, Any]:
    """What the planner would choose on as many devices, and by how much it would be faster."""
    plan = find_plan(model, count_devices(model.config), KEPT)
    best = plan.best[0]
    faster = plan.today.step_s / best.step_s
    print(
        f"the planner's choice on {count_devices(model.config)} devices, {faster:.2f} times as fast: {best.candidate}"
    )
    return {"faster": faster, "keys": best.candidate.changes, "bound_by": best.simulated.bound_by}


if __name__ == "__main__":
    main()
