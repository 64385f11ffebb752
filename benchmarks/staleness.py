"""The effect of staleness on grpo (with a dual clip, and with the decoupled loss's truncated weight in place of ratio
and clip), m2po, bapo and grpo with gradient control: `python benchmarks/staleness.py`

The cells are staleness 0, 4, 16 updates (mode bounded, exact lag: batch t is sampled by version max(0, t − s)) × seven
algorithms × seeds. Each cell is a whole run of the loop from the quickstart's base model (benchmarks/in_process.py).
Its file is stored in --output, and existing cells are not run again. `--cell 4:m2po:0` runs one cell, `--report` runs
none, `--sweep` instead the 3 × 3 thresholds around the defaults (GAC, Table 5b). The script writes a table and a plot.

* final: mean reward of the final policy on 256 held-out problems, one response each.
* drop: largest fall of the training reward (mean over 5 steps) below its highest value before.
* cosine: mean and standard deviation over the steps of the cosine of consecutive raw gradients.

Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import QUICKSTART_MODEL, one_rank, result

from engine.algorithm.alignment import WARM_UP, Thresholds
from engine.config import Config
from engine.config.recipe import HOME, load_config

STALENESS = (0, 4, 16)
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm.gradient_control": "measure"},
    "m2po": {"algorithm.loss": "m2po", "algorithm.gradient_control": "measure"},
    "bapo": {"algorithm.loss": "bapo", "algorithm.gradient_control": "measure"},
    "grpo+dual-clip": {"algorithm.dual_clip": 3.0, "algorithm.gradient_control": "measure"},
    "decoupled": {
        "algorithm.old_policy": "behavior",
        "algorithm.mismatch": "truncate",
        "algorithm.gradient_control": "measure",
    },
    "grpo+gac": {"algorithm.gradient_control": "gac"},
    "grpo+gac-auto": {"algorithm.gradient_control": "gac", "algorithm.gac_low": "auto", "algorithm.gac_high": "auto"},
}
"""Settings of the algorithms. With staleness above 0 "auto" is refused. Then the thresholds are those that "auto" finds
in the first steps of the grpo cell with the same seed at staleness 0, which is run first if needed."""
SWEEP = {
    f"gac-{low}-{high}": {"algorithm.gradient_control": "gac", "algorithm.gac_low": low, "algorithm.gac_high": high}
    for low, high in product((0.05, 0.1, 0.15), (0.2, 0.3, 0.4))
}
"""The thresholds of `--sweep`. Those of Table 5b are missing in our copy of the paper."""
SMOOTH = 5
"""Number of steps over which a point of the reward curve is the mean."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=6, help="prompts per step, of 8 responses each")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--cell", help="STALENESS:ALGORITHM:SEED, only this one")
    parser.add_argument("--sweep", action="store_true", help="the nine pairs of GAC's thresholds, at staleness 16")
    parser.add_argument("--report", action="store_true", help="only the table and the plot of existing cells")
    parser.add_argument("--output", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--plot", type=Path, help="PNG file; default: staleness.png in --output")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        with one_rank():
            for staleness, algorithm, seed in chosen(arguments):
                run(staleness=staleness, algorithm=algorithm, seed=seed, arguments=arguments, model=QUICKSTART_MODEL)
    cells = [json.loads(path.read_text()) for path in sorted(arguments.output.glob("*.json"))]
    print(table(cells))
    plot(cells, arguments.plot or arguments.output / "staleness.png")
    result({f"{s}:{a}": figures for (s, a), figures in summaries(cells).items()})


def chosen(arguments: argparse.Namespace) -> list[tuple[int, str, int]]:
    """The cells to run. One seed of each comes first, so that an interrupted run has a result for each."""
    if arguments.cell:
        staleness, algorithm, seed = arguments.cell.split(":")
        return [(int(staleness), algorithm, int(seed))]
    if arguments.sweep:
        return [(STALENESS[-1], name, seed) for seed, name in product(range(arguments.seeds), SWEEP)]
    return [(s, a, seed) for seed, s, a in product(range(arguments.seeds), STALENESS, ALGORITHMS)]


def run(staleness: int, algorithm: str, seed: int, arguments: argparse.Namespace, model: Path) -> None:
    """Run one cell and write its file, unless the file exists."""
    from in_process import train

    file = arguments.output / f"{staleness}-{algorithm}-{seed}.json"
    if file.exists():
        return
    settings = (ALGORITHMS | SWEEP)[algorithm]
    if staleness and "auto" in settings.values():
        run(staleness=0, algorithm="grpo", seed=seed, arguments=arguments, model=QUICKSTART_MODEL)
        settings = settings | on_policy(json.loads((arguments.output / f"0-grpo-{seed}.json").read_text()))
    started = time.perf_counter()
    cpu = time.process_time()
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(
            staleness=staleness,
            own=settings,
            seed=seed,
            arguments=arguments,
            places={"run.output": folder, "model.path": model},
        )
        figures, final = train(config)
    steps = [
        {
            name: line.get(name)
            for name in (
                "reward_mean",
                "grad_cosine",
                "skipped_updates",
                "clip_fraction",
                "old_ratio_max",
                "staleness_mean",
                "entropy",
                "grad_norm",
            )
        }
        for line in figures
    ]
    cell = {
        "staleness": staleness,
        "algorithm": algorithm,
        "seed": seed,
        "final": final,
        "steps": steps,
        "cpu_s": time.process_time() - cpu,
    }
    file.write_text(json.dumps(cell))
    print(
        f"staleness {staleness:2}, {algorithm:13} seed {seed}: final {final:.3f}, drop {drop(cell):.3f}, "
        f"{time.perf_counter() - started:.0f} s ({cell['cpu_s']:.0f} s of a core)",
        flush=True,
    )


def on_policy(cell: dict[str, Any]) -> dict[str, float]:
    """The thresholds that "auto" computes from a cell's cosines."""
    cosines = [abs(line["grad_cosine"]) for line in cell["steps"] if line["grad_cosine"] is not None]
    found = Thresholds(None, None, cosines[:WARM_UP]).now()
    if found is None:
        raise SystemExit(
            f"{len(cell['steps'])} steps are too few for automatic thresholds: give --steps {WARM_UP + 1} or more"
        )
    return dict(zip(("algorithm.gac_low", "algorithm.gac_high"), found, strict=True))


def config_of(
    staleness: int, own: dict[str, Any], seed: int, arguments: argparse.Namespace, places: dict[str, Any]
) -> Config:
    """The quickstart's recipe, smaller, with importance ratios against the engine that sampled."""
    lag = {"train.mode": "bounded", "train.max_staleness": staleness, "train.exact_lag": "true"}
    settings = {
        "run.name": "cell",
        "run.seed": seed,
        **places,
        **(lag if staleness else {"train.mode": "sync"}),
        "data.train": HOME / "data/addition_train.jsonl",
        "data.heldout": HOME / "data/addition_heldout.jsonl",
        "rollout.concurrency": arguments.prompts,
        "train.steps": arguments.steps,
        "train.prompts_per_step": arguments.prompts,
        "train.learning_rate": arguments.learning_rate,
        "train.micro_batch_tokens": 1024,
        "algorithm.old_policy": "rollout",
        "algorithm.kl_coef": 0.0,
        "checkpoint.every": 0,
        **own,
    }
    return load_config("infra/recipes/quickstart.toml", [f"{key}={value}" for key, value in settings.items()])


def smoothed(cell: dict[str, Any]) -> list[float]:
    """Running means of the training reward, each over SMOOTH steps."""
    rewards = [line["reward_mean"] for line in cell["steps"]]
    return [statistics.fmean(rewards[at : at + SMOOTH]) for at in range(max(1, len(rewards) - SMOOTH + 1))]


def drop(cell: dict[str, Any]) -> float:
    """The largest fall of the smoothed reward below its highest value before."""
    best = 0.0
    worst = 0.0
    for value in smoothed(cell):
        best = max(best, value)
        worst = max(worst, best - value)
    return worst


def summaries(cells: list[dict[str, Any]]) -> dict[tuple[int, str], dict[str, Any]]:
    """Means over the seeds and the range of the final rewards, by (staleness, algorithm)."""
    found = {}
    for staleness, algorithm in product(STALENESS, ALGORITHMS | SWEEP):
        same = [cell for cell in cells if (cell["staleness"], cell["algorithm"]) == (staleness, algorithm)]
        if not same:
            continue
        cosines = [[line["grad_cosine"] for line in cell["steps"] if line["grad_cosine"] is not None] for cell in same]
        skipped = [sum(bool(line["skipped_updates"]) for line in cell["steps"]) for cell in same]
        finals = [cell["final"] for cell in same]
        found[staleness, algorithm] = {
            "seeds": len(same), "final": statistics.fmean(finals), "final_low": min(finals), "final_high": max(finals),
            "drop": statistics.fmean(map(drop, same)), "worst_drop": max(map(drop, same)),
            "cosine_mean": statistics.fmean(map(statistics.fmean, cosines)),
            "cosine_spread": statistics.fmean(map(statistics.pstdev, cosines)), "skipped": statistics.fmean(skipped),
            "clip_fraction": statistics.fmean(line["clip_fraction"] for cell in same for line in cell["steps"]),
            "ratio_max": max(line["old_ratio_max"] for cell in same for line in cell["steps"]),
            "steps": len(same[0]["steps"]), "cpu_s": statistics.fmean(cell["cpu_s"] for cell in same),
        }  # fmt: skip
    return found


def table(cells: list[dict[str, Any]]) -> str:
    """The summaries as a Markdown table."""
    rows = [
        "| staleness | algorithm | seeds | final reward (range) | drop: mean, worst | cosine: mean, spread | tokens "
        "clipped or masked | largest ratio | updates skipped |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (staleness, algorithm), found in summaries(cells).items():
        rows.append(
            f"| {staleness} | {algorithm} | {found['seeds']} | {found['final']:.2f} "
            f"({found['final_low']:.2f}–{found['final_high']:.2f}) | {found['drop']:.2f}, {found['worst_drop']:.2f} "
            f"| {found['cosine_mean']:.2f}, {found['cosine_spread']:.2f} | {100 * found['clip_fraction']:.1f} % "
            f"| {found['ratio_max']:.1f} | {found['skipped']:.1f} of {found['steps']} |"
        )
    return "\n".join(rows)


def plot(cells: list[dict[str, Any]], path: Path) -> None:
    """Plot the smoothed training reward of every algorithm (mean over the seeds, with their range) in a panel for each
    staleness."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(STALENESS), figsize=(11, 3.4), sharey=True)
    for panel, staleness in zip(panels, STALENESS, strict=True):
        for color, algorithm in enumerate(ALGORITHMS):
            curves = [
                smoothed(cell) for cell in cells if (cell["staleness"], cell["algorithm"]) == (staleness, algorithm)
            ]
            points = list(zip(*curves, strict=True))
            if points:
                panel.plot([statistics.fmean(point) for point in points], label=algorithm, color=f"C{color}")
                panel.fill_between(
                    range(len(points)), [*map(min, points)], [*map(max, points)], color=f"C{color}", alpha=0.12
                )
        panel.set(title=f"staleness {staleness}", xlabel="step")
        if panel.has_data():
            panel.legend(fontsize=6)
    panels[0].set_ylabel(f"training reward, mean of {SMOOTH} steps")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
