"""The short runs from which a plan is measured."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from engine.config import Config
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.tools.planner.search import change_config

STEPS = 6
"""Number of steps of a probe. The first is not counted."""


def probe_settings(config: Config) -> Iterator[dict[str, Any]]:
    """Yield the keys of each probe: four occupancies of the instances, two sizes of windows, both sides one at a time
    and at once. Together they separate costs that always occur together in a single run."""
    places = config.groups_in_flight
    half = config.train.micro_batch_tokens // 2
    small = {"train.micro_batch_tokens": half} if half >= config.rollout.max_context else {}
    yield {"train.mode": "sync", "rollout.concurrency": 1}
    yield {"train.mode": "sync", "rollout.concurrency": 4 * places, **small}
    yield {"rollout.concurrency": places}
    yield {"rollout.concurrency": 2 * places, **small}


def probe_run(config: Config, keys: dict[str, Any], name: str) -> Config:
    """Return the config of a short run of the recipe with other keys, without checkpoints and evaluations."""
    rest = {
        "run.name": name,
        "train.steps": STEPS,
        "train.record": False,
        "train.warmup_steps": min(config.train.warmup_steps, STEPS),
        "checkpoint.every": 0,
        "evaluate.every": 0,
    }
    return change_config(config, keys | rest)


def measured_step_s(config: Config) -> float:
    """Return the median seconds of the steps of a finished run, without the first."""
    return float(median(line["step_s"] for line in list(read_lines(RunFolder(config.folder).steps))[1:]))
