"""Compares the time of the quickstart's steps with that of another checkout of this repository: `python
benchmarks/step_time.py --against OTHER_CHECKOUT [--pairs 4] [--steps 14]`

Each pair runs the orchestrator of both checkouts, in turn, on the same model and with the same keys. A run's figure is
the median of step_s (steps.jsonl) without the first two steps, in which processes warm up. Printed is each pair's
ratio, this checkout over the other: below 1, this one is faster. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from common import QUICKSTART_MODEL, result

from engine.config.recipe import HOME
from engine.run.files import read_lines

RUN = "import json, sys; from common import run_orchestrator; print(run_orchestrator(json.loads(sys.argv[1])).folder)"
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=14, help="of each run")
    parser.add_argument("--output", type=Path, default=Path("runs/step_time"))
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    output.mkdir(parents=True)  # runs of an earlier call there would be mixed with these
    model = QUICKSTART_MODEL
    ratios = []
    for pair in range(arguments.pairs):
        sides = {"this": HOME, "other": arguments.against.resolve()}
        order = sorted(sides, reverse=pair % 2 == 0)  # who is first alternates
        seconds = {
            side: step_s(
                sides[side],
                {
                    "model.path": str(model),
                    "run.output": str(output),
                    "run.name": f"{side}-{pair}",
                    "train.steps": arguments.steps,
                    "checkpoint.every": 0,
                },
            )
            for side in order
        }
        ratios.append(seconds["this"] / seconds["other"])
        told = ", ".join(f"{side} {seconds[side]:.3f} s" for side in sides)
        print(f"pair {pair}: {told}: {ratios[-1]:.3f}", flush=True)
    result({"pairs": len(ratios), "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)})


def step_s(checkout: Path, settings: dict[str, str | int]) -> float:
    """Median seconds of a step of a run of this checkout's code."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": f"{checkout}:{checkout / 'benchmarks'}"},
        cwd=checkout,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder = Path(done.stdout.splitlines()[-1])
    return statistics.median(line["step_s"] for line in list(read_lines(folder / "steps.jsonl"))[WARM_UP:])


if __name__ == "__main__":
    main()
