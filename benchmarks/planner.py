"""How well `metronome plan` predicts: steps of settings that it was not measured on. `python benchmarks/planner.py`

The settings are modes sync and periodic × 1, 2, 4, 8 groups in flight × micro-batches of 512, 1024, 2048 tokens × cores
apart (train.devices = [0], rollout.devices = [1]) or shared, of the quickstart: 48. For each placing of cores the costs
are measured on the probes of `metronome plan --measure`; settings that are probes are left out. Between the settings a
reference setting of the same placing runs again and again: a setting's figure is its step time over that of the
references beside it, since the machine's speed changes. The figures of both placings are then brought to one unit, the
reference on shared cores, by the medians of both references. --settings N takes N of the settings, by chance. Runs that
an earlier call has left in --output are not repeated.

* error: |predicted ratio / measured ratio − 1|, median and 90 % quantile
* tau: Kendall's rank correlation of predicted and measured ratios
* pick: measured ratio of the setting that is predicted to be the fastest, over the smallest measured one

`within` has the same of each placing alone. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from common import QUICKSTART_MODEL, result, run_orchestrator
from scipy.stats import kendalltau

from engine.config import Config
from engine.config.recipe import load_config
from engine.run.folder import RunFolder
from engine.tools.planner.calibration import fit_costs, measured_step_s, probe_settings, read_run
from engine.tools.planner.costs import Costs
from engine.tools.planner.lengths import Lengths
from engine.tools.planner.simulation import simulate_run

PLACINGS: tuple[dict[str, Any], ...] = ({"train.devices": [0], "rollout.devices": [1]}, {})
REFERENCE = {"train.mode": "periodic", "rollout.concurrency": 2, "train.micro_batch_tokens": 1024}
BETWEEN = 3
"""Settings between two runs of the reference."""
SEEDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=48)
    parser.add_argument("--steps", type=int, default=9, help="of each run; the first is not counted")
    parser.add_argument("--output", type=Path, default=Path("runs/planner"))
    parser.add_argument("--plot", type=Path, help="PNG of predicted against measured ratios")
    arguments = parser.parse_args()
    runs = Runs(arguments.output, arguments.steps)
    chosen = sorted(random.Random(0).sample(range(len(settings())), min(arguments.settings, len(settings()))))
    parts = [compared(runs, placing, [settings()[at] for at in chosen]) for placing in PLACINGS]
    unit = parts[-1]
    rows = [row for part in parts for row in part.in_units_of(unit)]
    if arguments.plot:
        draw(rows, arguments.plot)
    result({**figures(rows), "within": [figures(part.rows) for part in parts]})


def settings() -> list[dict[str, Any]]:
    """The settings of both placings, in a fixed order."""
    return [
        {**placing, "train.mode": mode, "rollout.concurrency": concurrency, "train.micro_batch_tokens": budget}
        for placing, mode, concurrency, budget in product(
            PLACINGS, ("sync", "periodic"), (1, 2, 4, 8), (512, 1024, 2048)
        )
    ]


class Runs:
    """Runs the orchestrator, each time under a new name."""

    def __init__(self, output: Path, steps: int) -> None:
        self.model = QUICKSTART_MODEL
        self._output = output
        self._steps = steps
        self._count = 0
        output.mkdir(parents=True, exist_ok=True)

    def run(self, keys: dict[str, Any]) -> Config:
        """Run the quickstart for some steps with these keys, unless an earlier call has."""
        self._count += 1
        wanted = {
            "model.path": self.model,
            "run.name": f"run-{self._count:03d}",
            "run.output": self._output,
            "train.steps": self._steps,
            "checkpoint.every": 0,
            **keys,
        }
        config = load_config(None, [f"{key}={value}" for key, value in wanted.items()])
        folder = RunFolder(config.folder)
        if folder.policy.exists() and folder.read_config() == config:
            return config
        return run_orchestrator(wanted)


@dataclass(frozen=True)
class Compared:
    """The settings of one placing."""

    rows: list[dict[str, Any]]
    """Each with its ratios to the placing's reference."""
    measured_s: float
    """A step of the reference, the median of all its runs."""
    predicted_s: float

    def in_units_of(self, other: Compared) -> list[dict[str, Any]]:
        """The rows with their ratios to another placing's reference."""
        measured = self.measured_s / other.measured_s
        predicted = self.predicted_s / other.predicted_s
        return [
            row | {"measured": row["measured"] * measured, "predicted": row["predicted"] * predicted}
            for row in self.rows
        ]


def compared(runs: Runs, placing: dict[str, Any], chosen: Sequence[dict[str, Any]]) -> Compared:
    """Measure and predict the settings of one placing, relative to the reference."""
    known = [placing | keys for keys in probe_settings(runs.run(placing | REFERENCE))]
    measured = [read_run(runs.run(keys).folder) for keys in known]
    costs = fit_costs(measured)
    lengths = Lengths(tuple(group for run in measured for group in Lengths.of_run(run.spans).groups), "probes")
    mine = [keys for keys in chosen if all(keys.get(key) == placing.get(key) for key in PLACINGS[0])]
    mine = [keys for keys in mine if keys not in known and keys != placing | REFERENCE]
    rows = []
    references = [before := runs.run(placing | REFERENCE)]
    for start in range(0, len(mine), BETWEEN):
        configs = [runs.run(keys) for keys in mine[start : start + BETWEEN]]
        references.append(after := runs.run(placing | REFERENCE))
        unit = statistics.fmean(measured_step_s(one) for one in (before, after))
        for keys, config in zip(mine[start : start + BETWEEN], configs, strict=True):
            row = {
                "setting": keys,
                "measured": measured_step_s(config) / unit,
                "predicted": predicted_s(config, costs, lengths) / predicted_s(after, costs, lengths),
            }
            print(f"measured {row['measured']:.3f}  predicted {row['predicted']:.3f}  {json.dumps(keys)}", flush=True)
            rows.append(row)
        before = after
    return Compared(
        rows=rows,
        measured_s=statistics.median(map(measured_step_s, references)),
        predicted_s=predicted_s(before, costs, lengths),
    )


def predicted_s(config: Config, costs: Costs, lengths: Lengths) -> float:
    """Seconds of a step by simulation."""
    return statistics.fmean(simulate_run(config, costs, lengths, seed).step_s for seed in range(SEEDS))


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last line's figures."""
    errors = sorted(abs(row["predicted"] / row["measured"] - 1) for row in rows)
    pick = min(rows, key=lambda row: row["predicted"])
    return {
        "settings": len(rows),
        "error_median": statistics.median(errors),
        "error_p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "tau": float(kendalltau([row["predicted"] for row in rows], [row["measured"] for row in rows]).statistic),
        "pick": pick["measured"] / min(row["measured"] for row in rows),
    }


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Predicted against measured ratios."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(5, 5))
    for mode, color in (("sync", "#4e79a7"), ("periodic", "#f28e2b")):
        mine = [row for row in rows if row["setting"]["train.mode"] == mode]
        axes.scatter([row["measured"] for row in mine], [row["predicted"] for row in mine], s=16, c=color, label=mode)
    ends = [min(row["measured"] for row in rows), max(row["measured"] for row in rows)]
    axes.plot(ends, ends, c="#bab0ac", lw=1)
    axes.set_xlabel("measured step, × the reference on shared cores")
    axes.set_ylabel("predicted step, × the reference on shared cores")
    axes.legend()
    plt.tight_layout()
    plt.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
