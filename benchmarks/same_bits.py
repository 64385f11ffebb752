"""Whether a change has moved a number: `python benchmarks/same_bits.py --against OTHER_CHECKOUT [--only NAME ...]`

Small deterministic jobs of four steps are trained with this checkout and with another one, by the same interpreter:
each mode, two replicas, a pipeline, several updates, a KL term, dynamic sampling, a resumed run. Compared are the bytes
of the trained policy and every figure of steps.jsonl but times, speeds and memory. `--keep FOLDER` keeps the runs; a
folder that was kept before takes the place of the other checkout with `--baseline FOLDER`. Exit code 1 if anything
differs.
Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
BASE = {
    "train.steps": 4, "train.consume": "prompt_order", "rollout.deterministic": "true", "train.prompts_per_step": 8,
    "rollout.group_size": 4, "checkpoint.every": 2, "run.seed": 7, "algorithm.old_policy": "behavior",
    "train.micro_batch_tokens": 150,
}  # fmt: skip
"""A group has about 125 tokens, so a step has several windows, and each replica trains some."""
JOBS: dict[str, dict[str, object]] = {
    "sync": {"train.mode": "sync"},
    "periodic": {},
    "one_step_off": {"train.mode": "one_step_off"},
    "bounded": {"train.mode": "bounded", "train.max_staleness": 2, "train.exact_lag": "true"},
    "two_replicas": {"parallel.data": 2},
    "pipeline": {
        "parallel.pipeline": 2,
        "train.mode": "sync",
        "train.micro_batch_tokens": 70,
        "train.prompts_per_step": 32,
    },
    "four_updates": {"train.updates": 4},
    "kl_previous": {"algorithm.kl_coef": 0.05, "algorithm.old_policy": "previous"},
    "dynamic_sampling": {"algorithm.dynamic_sampling": "true"},
    "resumed": {"checkpoint.every": 1},
}
"""Name → what it sets beside BASE."""
MOVING = ("_s", "_gib", "wait_ratio", "tokens_per_s_per_device", "mfu")
"""Ends of the names of figures that differ between equal runs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--baseline", type=Path, help="folder with kept runs of another checkout")
    parser.add_argument("--keep", type=Path, help="folder for this checkout's runs")
    parser.add_argument("--model", type=Path, help="base model (default: the quickstart's)")
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    arguments = parser.parse_args()
    model = (arguments.model or HERE / "data/quickstart_model").resolve()
    with tempfile.TemporaryDirectory() as scratch:
        ours = arguments.keep or Path(scratch) / "ours"
        other = arguments.baseline or Path(scratch) / "other"
        found = {}
        for name in arguments.only:
            train(HERE, name, ours, model)
            if arguments.baseline is None:
                train(arguments.against or HERE, name, other, model)
            found[name] = compared(ours / name, other / name)
            print(f"{name:17} weights {found[name]['weights']}  figures {found[name]['figures']}", flush=True)
    print("RESULT " + json.dumps(found))
    return 0 if all(all(one.values()) for one in found.values()) else 1


def train(checkout: Path, name: str, folder: Path, model: Path) -> None:
    """Train a job with a checkout into <folder>/<name>."""
    settings = BASE | JOBS[name] | {"run.name": name, "run.output": str(folder), "model.path": str(model)}
    if name == "resumed":
        launch(checkout, settings | {"train.steps": 2})
        launch(checkout, settings, "--resume")
    else:
        launch(checkout, settings)


def launch(checkout: Path, settings: dict[str, object], *arguments: str) -> None:
    """Run `metronome train` of a checkout. Raises RuntimeError with its output if it fails."""
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        "from flows.main import main; main()",
        "train",
        *given,
        *arguments,
    ]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{checkout}: {settings['run.name']} failed\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def compared(one: Path, other: Path) -> dict[str, bool]:
    """Whether the trained policies and the figures of two runs are equal."""
    return {"weights": digest(one) == digest(other), "figures": list(figures(one)) == list(figures(other))}


def digest(run: Path) -> str:
    """sha256 of the trained policy's weights."""
    files = sorted((run / "policy").glob("*.safetensors"))
    assert files, f"{run} has no trained policy"
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def figures(run: Path) -> Iterator[dict[str, Any]]:
    """The lines of steps.jsonl without what differs between equal runs."""
    for line in (run / "steps.jsonl").read_text().splitlines():
        yield {key: value for key, value in json.loads(line).items() if not key.endswith(MOVING)}


if __name__ == "__main__":
    sys.exit(main())
