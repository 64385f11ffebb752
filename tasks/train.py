"""Train: the launcher, with its steps on the console, in MLflow and as a Prefect progress artifact."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE

from engine.config import Config
from tasks import tracking
from tasks.console import StepLines
from tasks.training import run_training

UPDATE_S = 5.0
"""Seconds between updates of the artifact: each is a request to the Prefect server."""


@task(name="train", cache_policy=NO_CACHE)
def train(config: Config) -> None:
    """Train from step 0. Raises what ended the run."""
    progress, line = _Progress(config.train.steps), StepLines(config.train.steps)

    def on_step(row: dict[str, Any]) -> None:
        line(row)
        tracking.log_step(row)
        progress(row)

    run_training(config, on_step=on_step)


class _Progress:
    """A progress artifact that is updated every few seconds and at the end."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._id = create_progress_artifact(0.0, key="training", description=f"Training, {steps} steps")
        self._updated = time.monotonic()

    def __call__(self, row: Mapping[str, Any]) -> None:
        done = row["step"] + 1
        if done == self._steps or time.monotonic() - self._updated > UPDATE_S:
            self._updated = time.monotonic()
            update_progress_artifact(self._id, 100.0 * done / self._steps)
