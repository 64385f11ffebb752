"""Train: runs the launcher, sends its steps to the console, MLflow and Prefect, and starts it again if it dies."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from engine.config import Config
from engine.errors import CheckpointError, DeadlineError, MetronomeError, ProcessDied, Stopped, TransferError
from engine.run.folder import RunFolder
from engine.types import JsonObject
from tasks.console import StepLines, say
from tasks.finished_stages import count_attempt, last_end
from tasks.launcher_process import run_training
from tasks.progress import Progress
from tasks.tracking import tracked_run
from tasks.tracking.evaluations import InRun

RETRIES = 1_000_000
"""Prefect's retries are practically unlimited. The limit is `run.resumes`, which counts attempts without progress."""
DELAY_S = 3.0
"""Seconds between a death and the next start."""


def _worth_resuming(task: Any, run: Any, state: Any) -> bool:  # noqa: ANN401
    """Whether the training is started again: yes after a death or a signal, no after a wrong reward or wrong input."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, ProcessDied | Stopped | DeadlineError | TransferError | CheckpointError)


@task(
    name="train",
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=DELAY_S,
    retry_condition_fn=_worth_resuming,
)
def train(config: Config, resume: bool = False) -> int:
    """Train, from the newest published checkpoint if `resume` or when tried again, else from step 0; the number of
    steps.

    Raises what ended the run; MetronomeError when it is not resumed any more.
    """
    folder = RunFolder(config.folder)
    line = StepLines(config.train.steps)
    again = (task_run.run_count or 1) > 1
    why = last_end(folder) if again else "the start of the flow"
    count_attempt(folder, "training", config.run.resumes, why)
    if again:
        say("resume", f"the attempt before ended: {why}")
    evaluated = InRun(folder)
    with Progress(config) as progress:

        def on_step(row: JsonObject) -> None:
            line(row)
            tracked_run.log_step(row)
            progress(row)
            evaluated()

        try:
            run_training(config, resume or again, on_step=on_step)
        except MetronomeError as error:
            folder.fail(error)  # also what the launcher could not write: how it died
            raise
    return config.train.steps
