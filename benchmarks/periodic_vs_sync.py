"""How much faster is periodic than sync, on the same work? `python benchmarks/periodic_vs_sync.py [--pairs 3]`

Runs both modes in turn, with trainer and rollout instance each on a core of its own, and compares the measured ratio of
trained tokens/s/device with two bounds:

* ideal bound: (I + T + w) / (max(I, T) + w), where I is the rollout time, T the training time, and w the exposed sync
  and update of sync steps.
* schedule bound: a group cannot be trained before it arrives. The bound is computed from the arrivals and costs in the
  sync runs by end_k = max(end_{k-1}, arrive_k) + train_k, each scaled by the measured slow-down when both cores are
  busy.

Then the quickstart runs with each `rollout.concurrency`: the ratio of both modes, each with its own best.

Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import QUICKSTART_MODEL

from engine.config.recipe import load_config
from engine.run.files import read_lines
from engine.run.folder import dump_config
from engine.run.trace import read_spans

BALANCED = {
    "train.prompts_per_step": 96,
    "train.micro_batch_tokens": 256,
    "algorithm.old_policy": "behavior",
    "algorithm.kl_coef": 0.0,
}
"""Changes to the quickstart recipe: 96 groups a step; one model, so that training takes about as long as rollouts; one
group per window, so that both modes do exactly the same work (packing favours sync, where all groups are there)."""

WARM_UP = 2
"""Number of first steps of a run that do not count, because allocators and caches are cold."""


@dataclass(frozen=True)
class Step:
    """Figures of one measured step, in seconds."""

    tokens: int
    step_s: float
    rollout_s: float
    train_s: float
    fixed_s: float
    """Sync and update, which do not overlap with anything in either mode."""
    arrivals: list[float]
    """The time at which each group was ready, since the step's first dispatch, in order."""
    windows: int
    """Number of windows in which the groups were trained."""
    costs: list[float]
    """Training time of each group (its share of its window's), in the order of training."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each mode")
    parser.add_argument("--steps", type=int, default=5, help="measured steps per run")
    parser.add_argument("--concurrency", nargs="+", default=["2", "3", "4", "all"], help="rollout.concurrency")
    parser.add_argument("--only-best", action="store_true", help="only the best rates of both modes")
    parser.add_argument("--model", help="Hugging Face folder (default: the quickstart's base model)")
    arguments = parser.parse_args()
    model = arguments.model or str(QUICKSTART_MODEL)
    result: dict[str, Any] = {}
    settings = {} if arguments.only_best else {"balanced": BALANCED, "quickstart": {}}
    for name, overrides in settings.items():
        steps = measure(name=name, overrides=overrides, model=model, pairs=arguments.pairs, steps=arguments.steps)
        result[name] = figures(steps["sync"], steps["periodic"])
        show(name, result[name])
    rates: dict[str, dict[str, float]] = {"sync": {}, "periodic": {}}
    for concurrency in arguments.concurrency:
        overrides = {"rollout.concurrency": concurrency}
        name = f"concurrency {concurrency}"
        steps = measure(name=name, overrides=overrides, model=model, pairs=arguments.pairs, steps=arguments.steps)
        for mode, found in steps.items():
            rates[mode][concurrency] = rate(found)
    best = {mode: max(found, key=found.__getitem__) for mode, found in rates.items()}
    ratio = rates["periodic"][best["periodic"]] / rates["sync"][best["sync"]]
    print(f"each mode at its own best concurrency, {best}: ratio {ratio:.2f}")
    told = {**result.pop("balanced", {}), **result, "rates": rates, "best": best, "ratio_of_best": ratio}
    print("RESULT " + json.dumps(told))


def measure(name: str, overrides: dict[str, Any], model: str, pairs: int, steps: int) -> dict[str, list[Step]]:
    """The measured steps of both modes; the runs alternate."""
    found: dict[str, list[Step]] = {"sync": [], "periodic": []}
    with tempfile.TemporaryDirectory() as output:
        for pair in range(pairs):
            for mode in found:
                settings = overrides | {
                    "run.output": output,
                    "run.name": f"{mode}-{pair}",
                    "run.seed": pair,  # a pair does the same work up to sampling differences of fp32 rounding
                    "model.path": model,
                    "train.mode": mode,
                    "train.steps": steps + WARM_UP,
                    "train.devices": [0],
                    "rollout.devices": [1],
                    "checkpoint.every": 0,
                }
                found[mode] += run(settings, Path(output))
                last = found[mode][-1]
                print(
                    f"{name} {mode} {pair}: {last.step_s:.2f} s a step, "
                    f"I {last.rollout_s:.2f} s, T {last.train_s:.2f} s",
                    flush=True,
                )
    return found


def run(settings: dict[str, Any], output: Path) -> list[Step]:
    """Run the orchestrator once; returns its measured steps."""
    config = load_config("infra/recipes/quickstart.toml", [f"{key}={value}" for key, value in settings.items()])
    path = output / f"{config.run.name}.toml"
    dump_config(config, path)
    subprocess.run([sys.executable, "-m", "engine.orchestrator.launch", "--config", str(path)], check=True, timeout=600)
    spans = read_spans(config.folder / "trace")
    lines = list(read_lines(config.folder / "steps.jsonl"))
    return [read_step(line, [span for span in spans if span.get("step") == line["step"]]) for line in lines[WARM_UP:]]


def read_step(line: dict[str, Any], spans: list[dict[str, Any]]) -> Step:
    """A step's figures from its report and its spans."""
    first = min(span["start"] for span in spans if span["name"] == "rollout")
    ready: dict[int, float] = {}
    for span in spans:
        if span["name"] == "verify":
            ready[span["group"]] = max(ready.get(span["group"], 0.0), span["end"] - first)
    windows = [(span["end"] - span["start"], len(span["groups"])) for span in spans if span["name"] == "train"]
    costs = [cost / count for cost, count in windows for _ in range(count)]
    return Step(
        tokens=line["trained_tokens"],
        step_s=line["step_s"],
        rollout_s=line["rollout_s"],
        train_s=line["train_s"],
        fixed_s=line["sync_s"] + line["update_s"],
        arrivals=sorted(ready.values()),
        windows=len(windows),
        costs=costs,
    )


def figures(sync: list[Step], periodic: list[Step]) -> dict[str, float]:
    """Rates, their ratio and the two bounds; medians over steps."""
    rollout, train, fixed = (median(sync, key) for key in ("rollout_s", "train_s", "fixed_s"))
    slow_rollout = median(periodic, "rollout_s") / rollout
    slow_train = median(periodic, "train_s") / train
    rates = {mode: rate(steps) for mode, steps in (("sync", sync), ("periodic", periodic))}
    scheduled = statistics.median(schedule(step, slow_rollout, slow_train) for step in sync)
    return {
        "ratio": rates["periodic"] / rates["sync"],
        "ideal_bound": (rollout + train + fixed) / (max(rollout, train) + fixed),
        "schedule_bound": median(sync, "step_s") / (scheduled + fixed),
        "sync_tokens_per_s_per_device": rates["sync"],
        "periodic_tokens_per_s_per_device": rates["periodic"],
        "train_over_rollout": train / rollout,
        "slow_down_rollout": slow_rollout,
        "slow_down_train": slow_train,
        "groups_per_window_sync": groups_per_window(sync),
        "groups_per_window_periodic": groups_per_window(periodic),
        "steps_each": len(sync),
    }


def schedule(step: Step, slow_rollout: float, slow_train: float) -> float:
    """The time at which the last group is trained if training takes groups as they arrive, in seconds after the first
    dispatch."""
    end = 0.0
    for arrival, cost in zip(step.arrivals, step.costs, strict=True):
        end = max(end, arrival * slow_rollout) + cost * slow_train
    return end


def rate(steps: list[Step]) -> float:
    """Trained tokens per second and device, for two devices of one core each."""
    return sum(step.tokens for step in steps) / sum(step.step_s for step in steps) / 2


def groups_per_window(steps: list[Step]) -> float:
    """Mean number of groups per window. If it differs between the modes, a part of the slow-down is worse packing."""
    return sum(len(step.costs) for step in steps) / sum(step.windows for step in steps)


def median(steps: list[Step], key: str) -> float:
    """The median of one figure over steps."""
    return statistics.median(getattr(step, key) for step in steps)


def show(name: str, found: dict[str, float]) -> None:
    """Print the result as text."""
    print(
        f"\n{name}: periodic {found['periodic_tokens_per_s_per_device']:.0f}, sync "
        f"{found['sync_tokens_per_s_per_device']:.0f} trained tokens/s/device: ratio {found['ratio']:.2f}"
    )
    print(
        f"  ideal bound {found['ideal_bound']:.2f}, schedule bound {found['schedule_bound']:.2f} "
        f"(reached {found['ratio'] / found['schedule_bound']:.0%}), T/I {found['train_over_rollout']:.2f}, slow-down "
        f"rollout {found['slow_down_rollout']:.2f} train {found['slow_down_train']:.2f}, groups per window sync "
        f"{found['groups_per_window_sync']:.1f} periodic {found['groups_per_window_periodic']:.1f}",
        flush=True,
    )
    if not 0.8 <= found["train_over_rollout"] <= 1.25:
        print("  T/I is outside 0.8 ... 1.25, so the bounds are far from 2 for any schedule")
    print()


if __name__ == "__main__":
    main()
